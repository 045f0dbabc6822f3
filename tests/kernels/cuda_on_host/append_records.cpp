// append_kv's records by the source of csrc/sm_90/append_kv on a CPU, one block after the other, the last first, so that
// a row that should not be written stays. FORMAT and TOKENS are the instance's. Arguments: files of AppendKvParams, whose addresses are set here, kv_c, k_pe, the cache, slots, and where they are rotated cos_sin and
// positions. The cache is written back.
#include "caches_in_files.hpp"

inline int atomicMax(int* word, int value) { return std::exchange(*word, std::max(*word, value)); }
inline int atomicCAS(int* word, int expected, int value) {
  return std::exchange(*word, *word == expected ? value : *word);
}
inline int __ffs(uint32_t bits) { return __builtin_ffs(bits); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return (static_cast<uint64_t>(high) << 32 | low) >> by % 32;
}

#include "sm_90/append_kv/append_bulk.hpp"
#include "sm_90/append_kv/append_by_warps.hpp"
#include "sm_90/append_kv/record_row.hpp"

namespace {

using mla::sm_90::AppendBulk, mla::sm_90::AppendByWarps;
constexpr bool bulk = TOKENS > AppendByWarps::warps;
mla::AppendKvParams params;
std::conditional_t<bulk, AppendBulk::Shared<mla::sm_90::RecordPlace>, AppendByWarps::Shared> shared;

template <int angle_bytes>
using Row = mla::sm_90::RecordRow<mla::sm_90::FORMAT, angle_bytes>;

template <class Row>
void append(Row row) {
  if constexpr (bulk)
    AppendBulk::write(params, shared, row);
  else
    AppendByWarps::run(params, shared, row);
}

void kernel() {
  if constexpr (mla::sm_90::FORMAT::ROTATES)
    mla::sm_90::with_row_of<Row>(params, [](auto row) { append(row); });
  else
    append(Row<0>(params));
}

}  // namespace

int main(int count, char** names) {
  size_t bytes, cache_bytes;
  std::memcpy(&params, read(names[1], bytes), sizeof params);
  params.kv_c = read(names[2], bytes);
  params.k_pe = read(names[3], bytes);
  params.kv_cache = read(names[4], cache_bytes);
  params.slot_mapping = read(names[5], bytes);
  params.cos_sin = count > 6 ? read(names[6], bytes) : nullptr;
  params.positions = count > 6 ? read(names[7], bytes) : nullptr;
  Block block(1);
  for (blockIdx.x = (params.tokens + params.group - 1) / params.group; blockIdx.x-- != 0;)
    if (!block.run(kernel)) return 1;
  std::ofstream(names[4], std::ios::binary).write(reinterpret_cast<const char*>(params.kv_cache), cache_bytes);
}
