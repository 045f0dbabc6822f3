// Element types and conversions on a CPU.
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

inline void unpack_fp16_bits(uint32_t packed, uint32_t& low, uint32_t& high) {
  float values[2];
  unpack_pair<fp16>(packed, values);
  low = float_to_bits(values[0]);
  high = float_to_bits(values[1]);
}
inline float fp16_value(uint16_t bits) { return fp16_to_float(bits); }

inline void e4m3_to_fp16(uint32_t stored, uint32_t& first, uint32_t& last) {
  const auto two = [](uint32_t bytes) {
    return pack_pair<fp16>(e4m3_to_float(static_cast<uint8_t>(bytes)), e4m3_to_float(static_cast<uint8_t>(bytes >> 8)));
  };
  first = two(stored);
  last = two(stored >> 16);
}

}  // namespace mla::sm_90
