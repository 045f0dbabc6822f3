// Rows of append_kv's records by the source of csrc/sm_90/append_kv/record_row.hpp on a CPU: one warp writes one token
// after the other. FORMAT is the instance's. Arguments: files of AppendKvParams, whose addresses are set here, kv_c, k_pe,
// the cache, slots (int32), and where they are rotated cos_sin and positions (int32). The cache is written back.
#include "caches_in_files.hpp"

#include "sm_90/append_kv/record_row.hpp"
#include "sm_90/append_kv/row_buffer.hpp"

namespace {

mla::AppendKvParams params;
int token, slot;
uint32_t position;

template <int angle_bytes>
void write_one() {
  using namespace mla::sm_90;
  RecordRow<FORMAT, angle_bytes> row;
  const int lane = current;
  const RowBuffer<decltype(row)> buffer{1024};
  buffer.copy(params, token, lane);
  buffer.copy_angle(params, position, lane);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  row.read(params, buffer.at, lane);
  row.store(params, row.offset(params, slot), lane);
}

void kernel() {
  if constexpr (mla::sm_90::FORMAT::ROTATES) {
    if (params.cos_sin != nullptr) return params.angle_type == mla::ENCODED_FP32 ? write_one<4>() : write_one<2>();
  }
  write_one<0>();
}

}  // namespace

int main(int count, char** names) {
  size_t bytes, cache_bytes;
  std::memcpy(&params, read(names[1], bytes), sizeof params);
  params.kv_c = read(names[2], bytes);
  params.k_pe = read(names[3], bytes);
  params.kv_cache = read(names[4], cache_bytes);
  const auto* slots = reinterpret_cast<const int32_t*>(read(names[5], bytes));
  params.cos_sin = count > 6 ? read(names[6], bytes) : nullptr;
  const auto* positions = count > 6 ? reinterpret_cast<const int32_t*>(read(names[7], bytes)) : nullptr;
  Block block(1);
  for (token = 0; token < params.tokens; ++token) {
    slot = slots[token];
    position = positions != nullptr ? positions[token] : 0;
    if (!block.run(kernel)) return 1;
  }
  std::ofstream(names[4], std::ios::binary).write(reinterpret_cast<const char*>(params.kv_cache), cache_bytes);
}
