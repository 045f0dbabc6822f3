// Rows of append_kv's records by the source of csrc/sm_90/append_kv/record_row.hpp on a CPU: one warp writes one token
// after the other. FORMAT is the instance's. Arguments: files of AppendKvParams, whose addresses are set here, kv_c, k_pe,
// the cache, slots (int32), and where they are rotated cos_sin and positions (int32). The cache is written back.
#include <fstream>
#include <iterator>
#include <string>

#include "block.hpp"

// Words of CUDA that csrc/sm_90/wave.hpp names, for kernels that other programs run.
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int atomicExch(int* word, int value) { return std::exchange(*word, value); }
inline int atomicOr(int* word, int bits) { return std::exchange(*word, *word | bits); }
inline int __reduce_max_sync(unsigned, int x) { return x; }
inline int __reduce_add_sync(unsigned, int x) { return x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }

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

// A file's bytes, where a GPU's allocator would put them.
uint8_t* read(const char* name, size_t& bytes) {
  std::ifstream file(name, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  bytes = text.size();
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(256, (bytes + 256) / 256 * 256));
  std::memcpy(memory, text.data(), bytes);
  return memory;
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
