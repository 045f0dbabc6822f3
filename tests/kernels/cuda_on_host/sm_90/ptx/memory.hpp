// Memory on a CPU. Shared memory is an array, whose addresses begin at 0.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

constexpr uint32_t SHARED_BYTES = 232448;
alignas(1024) inline unsigned char memory[SHARED_BYTES];

inline unsigned char* shared_at(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0 || address + bytes > SHARED_BYTES) fail("no such shared address:", address);
  return memory + address;
}

inline uint32_t smem_address(const void*) { return 0; }
inline int warpgroup_thread() { return current % 128; }
inline int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }
inline void prefetch_l2(const void*) {}
inline void prefetch_l1(const void*) {}
template <class V>
V ld_global(const V* address) {
  return *address;
}
inline void ld_global_v4(const void* from, uint32_t (&to)[4]) { std::memcpy(to, from, 16); }
inline int ld_relaxed_gpu(const int32_t* address) { return *address; }

template <class V>
V ld_shared(uint32_t from) {
  V value;
  std::memcpy(&value, shared_at(from, 4), 4);
  return value;
}
template <class V>
void st_shared(uint32_t to, V value) {
  std::memcpy(shared_at(to, 4), &value, 4);
}
inline void ld_shared_v4(uint32_t from, uint32_t (&to)[4]) { std::memcpy(to, shared_at(from, 16), 16); }
inline void st_shared_v4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  std::memcpy(shared_at(to, 16), words, 16);
}

}  // namespace mla::sm_90
