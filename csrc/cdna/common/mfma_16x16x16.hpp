// The matrix instructions that contract 16 values, with named operands: accumulator(16 x 16) += left(16 x k) * right(k
// x 16).
//
// Lane map of the 16x16x16 forms (l = lane):
//   left         lane l holds row    l % 16, k = 4 * (l / 16) + 0..3
//   right        lane l holds column l % 16, k = 4 * (l / 16) + 0..3
//   accumulator  lane l holds column l % 16, rows 4 * (l / 16) + 0..3
// So an accumulator, rounded to 16 bits, is the right operand of a product that contracts over its rows.
#pragma once

#include "cdna/common/types.hpp"
#include "common/kv_format.hpp"

namespace cdna {

template <class Element>
struct Mfma16x16x16;

template <>
struct Mfma16x16x16<mla::bf16> {
  MLA_DEVICE static f32x4 multiply(u32x2 left, u32x2 right, f32x4 accumulator) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(s16x4, left), __builtin_bit_cast(s16x4, right),
                                                     accumulator, 0, 0, 0);
  }
};

template <>
struct Mfma16x16x16<mla::fp16> {
  MLA_DEVICE static f32x4 multiply(u32x2 left, u32x2 right, f32x4 accumulator) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(f16x4, left), __builtin_bit_cast(f16x4, right),
                                                 accumulator, 0, 0, 0);
  }
};

// Contracts the eight consecutive values per lane that a 16-byte load brings. A sum does not depend on which of the 32
// columns a lane holds as long as both sides agree: lane l holds columns 8 * (l / 16) + 0..7.
template <class Element>
MLA_DEVICE f32x4 multiply_chunk(u32x4 left, u32x4 right, f32x4 accumulator) {
  accumulator = Mfma16x16x16<Element>::multiply(left.xy, right.xy, accumulator);
  return Mfma16x16x16<Element>::multiply(left.zw, right.zw, accumulator);
}

}  // namespace cdna
