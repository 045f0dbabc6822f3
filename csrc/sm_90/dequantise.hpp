// Stored e4m3 values (OCP) times their scale, as bf16, 16 at a time.
//
// An e4m3 value's bits are those of a bf16 that is 2^-120 of it, sign, exponent and fraction each moved to its place,
// denormals included: so a value costs 1.75 instructions of integer arithmetic, and its scale times 2^120 the rest. The
// conversion to fp16 that the hardware has would have to go on through fp32.
#pragma once

#include "mla/device.hpp"

namespace mla::sm90 {

constexpr uint32_t TWO_TO_120 = 0x7b807b80;  // as bf16, twice
constexpr uint32_t NOT_A_NUMBER = 0x7fff7fff;

MLA_DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
MLA_DEVICE uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
MLA_DEVICE uint32_t both(float value) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(value));
  return pair;
}

// What stored values are multiplied by, in both halves: as `high` + `low`, of 2^120 times the scale, or of the scale
// itself when that would be too large (`large`).
struct Factor {
  uint32_t high;
  uint32_t low;
  bool large;

  // x * high + x * low, rounded to bf16 twice, is x * scale within 0.504 units of the last place: `low` and its product
  // are each off by 2^-18 of the whole at most. One value of a thousand is not the nearest, but as good as that.
  MLA_DEVICE static Factor of_any(float scale) {
    const float raised = scale * bit_cast<float>(0x7b800000u);  // 2^120
    Factor factor;
    factor.large = !(fabsf(raised) < bit_cast<float>(0x7f000000u));  // 2^127; NaN is large
    factor.high = both(raised);
    factor.low = both(raised - bit_cast<float>(factor.high & 0xffff0000u));
    return factor;
  }

  // 2^(exponent - 127), 255 for NaN. Where it is large, `low` holds nothing.
  MLA_DEVICE static Factor of_power(uint32_t exponent) {
    return Factor{exponent * 0x00800080u + 120u * 0x00800080u, 0, exponent > 134};
  }

  // The same without 2^120, where it would be too large, and for whatever scale is met beside one.
  MLA_DEVICE static Factor of_any_large(float scale) {
    const uint32_t high = both(scale);
    return Factor{high, both(scale - bit_cast<float>(high & 0xffff0000u)), true};
  }
  MLA_DEVICE static Factor of_power_large(uint32_t exponent) {
    const uint32_t power = exponent == 0 ? 0x00400040u : exponent * 0x00800080u;
    return Factor{exponent == 255 ? NOT_A_NUMBER : power, 0, true};
  }
};

// 16 stored values to bf16, in order. A NaN code makes NaN of all 16: one among a key's values makes its scores NaN
// anyway, and so every result of the row. SPLIT: the factor has a low part. LARGE: it is without 2^120.
template <bool SPLIT, bool LARGE>
MLA_DEVICE void dequantise(const uint32_t (&stored)[4], Factor factor, uint32_t (&values)[8]) {
  // The carry that one more makes into the sign of 0x7f and 0xff, and of no other byte unless one below it is 0xff.
  uint32_t carries = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) carries |= (stored[i] + 0x01010101u) ^ stored[i];
  if (carries & 0x80808080u) factor.high = NOT_A_NUMBER;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t upper = (stored[i] & 0x80808080u) | ((stored[i] >> 4) & 0x07070707u);
    const uint32_t lower = (stored[i] << 4) & 0xf0f0f0f0u;
    uint32_t pair[2] = {__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (LARGE) pair[j] = multiply_pair(pair[j], TWO_TO_120);
      values[2 * i + j] = SPLIT ? multiply_add_pair(pair[j], factor.high, multiply_pair(pair[j], factor.low))
                                : multiply_pair(pair[j], factor.high);
    }
  }
}

}  // namespace mla::sm90
