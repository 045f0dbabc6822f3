// The matrix instructions that contract 32 or 128 values (CDNA4; CDNA3 has that of 32 fp8 values), with named operands:
// accumulator(16 x 16) += left(16 x k) * right(k x 16).
//
// Lane map (l = lane): left holds row l % 16, right column l % 16, the accumulator column l % 16 and rows
// 4 * (l / 16) + 0..3. Along k a lane of group l / 16 holds
//   16-bit, k = 32     8 * group + 0..7
//   fp8, k = 32        8 * group + 0..7
//   fp8, k = 128       16 * group + 0..15, then 64 + 16 * group + 0..15
// A sum does not depend on which values a lane holds as long as both sides agree.
#pragma once

#include "cdna/common/types.hpp"
#include "common/kv_format.hpp"

namespace cdna {

typedef short s16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef uint32_t u32x8 __attribute__((ext_vector_type(8)));

template <class Element>
struct Mfma16x16x32;

template <>
struct Mfma16x16x32<mla::bf16> {
  MLA_DEVICE static f32x4 multiply(u32x4 left, u32x4 right, f32x4 accumulator) {
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(bf16x8, left), __builtin_bit_cast(bf16x8, right),
                                                   accumulator, 0, 0, 0);
  }
};
template <>
struct Mfma16x16x32<mla::fp16> {
  MLA_DEVICE static f32x4 multiply(u32x4 left, u32x4 right, f32x4 accumulator) {
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(f16x8, left), __builtin_bit_cast(f16x8, right),
                                                  accumulator, 0, 0, 0);
  }
};
template <>
struct Mfma16x16x32<mla::fp8> {  // half the rate of the next, twice that of 16-bit ones on CDNA3
  MLA_DEVICE static f32x4 multiply(u32x2 left, u32x2 right, f32x4 accumulator) {
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, left), __builtin_bit_cast(long, right),
                                                      accumulator, 0, 0, 0);
  }
};

MLA_DEVICE f32x4 mfma_16x16x128_fp8(u32x8 left, u32x8 right, f32x4 accumulator) {
  constexpr int e4m3 = 0;
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(__builtin_bit_cast(i32x8, left),
                                                          __builtin_bit_cast(i32x8, right), accumulator, e4m3, e4m3, 0,
                                                          0, 0, 0);  // scales 0: unscaled
}

}  // namespace cdna
