// Stored e4m3 values (OCP) times their scale, as bf16, 16 at a time.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// Converts two stored values, the lower or the upper half of a register, to fp32 by way of fp16, which holds all of
// them exactly.
template <int HALF>
MLA_DEVICE float2 e4m3_pair(uint32_t stored) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(stored >> HALF * 16)));
  float2 values;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}

// Converts 16 stored values to bf16, in order. The product is rounded to fp32 and then to bf16. NaN stays NaN, and a
// product that no bf16 holds becomes infinite.
MLA_DEVICE void dequant(const uint32_t (&stored)[4], float scale, uint32_t (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pairs[2] = {e4m3_pair<0>(stored[i]), e4m3_pair<1>(stored[i])};
#pragma unroll
    for (int j = 0; j < 2; ++j)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(values[2 * i + j]) : "f"(pairs[j].y * scale), "f"(pairs[j].x * scale));
  }
}

// An E8M0 scale: 2^(exponent - 127), which fp32 holds as a denormal number where the exponent is 0; 255 is NaN.
MLA_DEVICE float e8m0_scale(uint32_t exponent) {
  const uint32_t usual = exponent << 23;
  return bit_cast<float>(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fffffffu : usual);
}

}  // namespace mla::sm_90
