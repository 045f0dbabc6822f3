// Element types, and conversions between them: rounded to nearest even, NaN stays NaN.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// Element types, as tags: those of the products, and one (e4m3) that is converted before it is multiplied.
struct bf16 {
  static constexpr bool is_bf16 = true;
};
struct fp16 {
  static constexpr bool is_bf16 = false;
};
struct fp8 {};

// Converts two floats to one register of two 16-bit elements, the first in the low half.
template <class T>
MLA_DEVICE uint32_t pack_pair(float low, float high) {
  uint32_t packed;
  if constexpr (T::is_bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The two elements of a register, the first in the low half. Halves of a register that are named need no shift.
template <class T>
MLA_DEVICE void unpack_pair(uint32_t packed, float (&values)[2]) {
  if constexpr (T::is_bf16) {
    values[0] = bit_cast<float>(packed << 16);
    values[1] = bit_cast<float>(packed & 0xFFFF0000u);
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
        : "=f"(values[0]), "=f"(values[1])
        : "r"(packed));
  }
}

// The bits of two fp16 values as fp32.
MLA_DEVICE void unpack_fp16_bits(uint32_t packed, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(packed));
}

MLA_DEVICE float fp16_value(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// The four e4m3 values (OCP) of a register as fp16, the first two and the last two: an instruction for each two. fp16
// holds all of them exactly.
MLA_DEVICE void e4m3_to_fp16(uint32_t stored, uint32_t& first, uint32_t& last) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(first), "=r"(last)
      : "r"(stored));
}

}  // namespace mla::sm_90
