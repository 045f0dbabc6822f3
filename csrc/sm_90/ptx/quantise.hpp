// What a row is quantised with: the largest of magnitudes, conversions to e4m3, and halves of words.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// The two bf16 values of a register as fp32.
MLA_DEVICE float bf16_low(uint32_t pair) { return bit_cast<float>(pair << 16); }
MLA_DEVICE float bf16_high(uint32_t pair) { return bit_cast<float>(pair & 0xFFFF0000u); }

// Converts four floats to e4m3 (OCP), the first to the lowest byte; a value beyond the range becomes the largest, and
// NaN the positive one.
MLA_DEVICE uint32_t e4m3_of(float a, float b, float c, float d) {
  uint32_t four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// The larger magnitude; NaN if one of them is NaN.
MLA_DEVICE float largest_magnitude(float a, float b) {
  float larger;
  asm("{\n.reg .f32 a, b;\nabs.f32 a, %1;\nabs.f32 b, %2;\nmax.NaN.f32 %0, a, b;\n}\n" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The larger magnitude of both lower halves, and of both upper halves, as fp16; NaN if one of them is NaN.
MLA_DEVICE uint32_t largest_magnitudes(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("{\n.reg .b32 a, b;\nabs.f16x2 a, %1;\nabs.f16x2 b, %2;\nmax.NaN.f16x2 %0, a, b;\n}\n"
      : "=r"(larger)
      : "r"(a), "r"(b));
  return larger;
}

// The smaller of both halves, as numbers without a sign.
MLA_DEVICE uint32_t min_u16x2(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.u16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

// Stores the low half of a word to shared memory.
MLA_DEVICE void st_shared_u16(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<uint16_t>(value)) : "memory");
}

}  // namespace mla::sm_90
