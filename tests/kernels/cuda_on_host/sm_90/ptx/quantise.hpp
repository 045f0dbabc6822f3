// What a row is quantised with, on a CPU.
#pragma once

#include "sm_90/ptx/convert.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

inline float bf16_low(uint32_t pair) { return bits_to_float(pair << 16); }
inline float bf16_high(uint32_t pair) { return bits_to_float(pair & 0xFFFF0000u); }

// To nearest even, up to the largest: a code is the number of bounds below its value.
inline uint32_t one_e4m3_of(float value) {
  if (std::isnan(value)) return 0x7F;
  uint32_t code = 0;
  for (; code < 0x7E; ++code) {
    const float bound = (e4m3_to_float(static_cast<uint8_t>(code)) + e4m3_to_float(static_cast<uint8_t>(code + 1))) / 2;
    if (std::fabs(value) < bound || (std::fabs(value) == bound && code % 2 == 0)) break;
  }
  return code | (std::signbit(value) ? 0x80 : 0);
}
inline uint32_t e4m3_of(float a, float b, float c, float d) {
  return one_e4m3_of(a) | one_e4m3_of(b) << 8 | one_e4m3_of(c) << 16 | one_e4m3_of(d) << 24;
}

inline float largest_magnitude(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : max(std::fabs(a), std::fabs(b));
}

inline uint32_t largest_magnitudes(uint32_t a, uint32_t b) {
  float of_a[2], of_b[2];
  unpack_pair<fp16>(a, of_a);
  unpack_pair<fp16>(b, of_b);
  return pack_pair<fp16>(largest_magnitude(of_a[0], of_b[0]), largest_magnitude(of_a[1], of_b[1]));
}

inline uint32_t min_u16x2(uint32_t a, uint32_t b) {
  return min(a & 0xFFFFu, b & 0xFFFFu) | min(a >> 16, b >> 16) << 16;
}

inline void st_shared_u16(uint32_t to, uint32_t value) { st_shared(to, static_cast<uint16_t>(value)); }

}  // namespace mla::sm_90
