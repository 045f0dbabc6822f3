// The types and descriptors of wgmma on a CPU; the products are in wgmma_products.hpp.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

struct bf16 {
  static constexpr bool is_bf16 = true;
};
struct fp16 {
  static constexpr bool is_bf16 = false;
};
struct fp8 {};

enum class Swizzle : uint64_t { none = 0, bytes128 = 1, bytes64 = 2 };
inline uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>(address >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
inline uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

void commit_products();
void wait_for_products(int pending);
inline void wgmma_fence() {}
inline void wgmma_commit() { commit_products(); }
template <int PENDING>
void wgmma_wait() {
  wait_for_products(PENDING);
}
template <int N>
void pin_accumulator(float (&)[N]) {}

template <class T>
uint32_t pack_pair(float low, float high) {
  return T::is_bf16 ? static_cast<uint32_t>(float_to_bf16(high)) << 16 | float_to_bf16(low)
                    : static_cast<uint32_t>(float_to_fp16(high)) << 16 | float_to_fp16(low);
}

template <class T>
void unpack_pair(uint32_t packed, float (&values)[2]) {
  for (int i = 0; i < 2; ++i) {
    const uint16_t bits = static_cast<uint16_t>(packed >> 16 * i);
    values[i] = T::is_bf16 ? bf16_to_float(bits) : fp16_to_float(bits);
  }
}

}  // namespace mla::sm_90
