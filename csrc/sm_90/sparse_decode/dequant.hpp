// Stored e4m3 values (OCP) times their scale, as bf16, 16 at a time. NaN stays NaN, and a product that no bf16 holds
// becomes infinite.
#pragma once

#include "sm_90/decode/convert_fp8.hpp"

namespace mla::sm_90 {

// Converts four stored values, in order, to fp32 by way of fp16, which holds all of them exactly.
MLA_DEVICE void e4m3_four(uint32_t stored, float2 (&values)[2]) {
  uint32_t pairs[2];
  e4m3_to_fp16(stored, pairs[0], pairs[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
        : "=f"(values[i].x), "=f"(values[i].y)
        : "r"(pairs[i]));
  }
}

// With an fp32 scale the product is rounded to fp32 and then to bf16.
MLA_DEVICE void dequant_fp32_scale(const uint32_t (&stored)[4], float scale, uint32_t (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pairs[2];
    e4m3_four(stored[i], pairs);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(values[2 * i + j]) : "f"(pairs[j].y * scale), "f"(pairs[j].x * scale));
  }
}

// An E8M0 scale is 2^(exponent - 127), which bf16 holds as a denormal number where the exponent is 0; 255 is NaN. bf16
// holds e4m3 values exactly, so the one product of two of them is rounded as the fp32 product would be.
MLA_DEVICE void dequant_e8m0_scale(const uint32_t (&stored)[4], uint32_t exponent, uint32_t (&values)[8]) {
  const uint32_t scale = exponent == 0 ? 0x0040u : exponent == 255 ? 0x7fffu : exponent << 7;
  convert_e4m3<bf16>(stored, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(values[i]) : "r"(scale * 0x10001u));
}

}  // namespace mla::sm_90
