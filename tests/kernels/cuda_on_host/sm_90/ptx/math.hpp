// Elementary functions on a CPU, exact where the hardware approximates, and arithmetic on pairs of 16-bit values.
#pragma once

#include "sm_90/ptx/convert.hpp"

namespace mla::sm_90 {

inline float exp2_with_denormals(float x) { return std::exp2(x); }
inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
struct RoundedApart {
  static float product(float a, float b) { return a * b; }
  static float difference(float a, float b) { return a - b; }
};
inline float add_without_subnormals(float a, float b) {
  const auto flushed = [](float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
  return flushed(flushed(a) + flushed(b));
}
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float reciprocal_of_normal(float x) { return 1.0f / x; }

inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;
}

// fp32 holds a product of two bf16; a sum may be rounded to fp32 before it is rounded to bf16.
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  float of_a[2], of_b[2], of_c[2];
  unpack_pair<bf16>(a, of_a);
  unpack_pair<bf16>(b, of_b);
  unpack_pair<bf16>(c, of_c);
  return pack_pair<bf16>(std::fma(of_a[0], of_b[0], of_c[0]), std::fma(of_a[1], of_b[1], of_c[1]));
}
inline void scale_fp16x2(uint32_t& a, uint32_t b) {  // fp32 holds a product of two fp16
  float of_a[2], of_b[2];
  unpack_pair<fp16>(a, of_a);
  unpack_pair<fp16>(b, of_b);
  a = pack_pair<fp16>(of_a[0] * of_b[0], of_a[1] * of_b[1]);
}
inline void scale_bf16x2(uint32_t& a, uint32_t b) { a = fma_bf16x2(a, b, 0x80008000u); }

}  // namespace mla::sm_90
