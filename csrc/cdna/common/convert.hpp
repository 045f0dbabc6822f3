// Conversions of floats to the 16-bit types, two at a time, for archs without a single instruction for it.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

// Rounds to nearest even. A NaN whose low half is full becomes zero, because the carry runs through its sign: see
// roundable.
MLA_DEVICE uint32_t round_to_bf16(float x) {
  const uint32_t bits = mla::bit_cast<uint32_t>(x);
  return bits + 0x7fff + (bits >> 16 & 1);
}
MLA_DEVICE uint32_t pack_bf16(float low, float high) {
  return __builtin_amdgcn_perm(round_to_bf16(high), round_to_bf16(low), 0x07060302);
}

// Rounds towards zero. A NaN that arithmetic made is quiet by its upper half and stays one.
MLA_DEVICE uint32_t truncate_to_bf16(float low, float high) {
  return __builtin_amdgcn_perm(mla::bit_cast<uint32_t>(high), mla::bit_cast<uint32_t>(low), 0x07060302);
}

// Returns a factor of results in a form whose NaN stays a NaN when the products are rounded.
MLA_DEVICE float roundable(float factor) {
  const uint32_t bits = mla::bit_cast<uint32_t>(opaque(factor));
  return mla::bit_cast<float>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000u : bits);
}

// Rounds P to bf16 with ties away from zero, one addition per value: the bound (half a unit) is that of round_to_bf16.
MLA_DEVICE uint32_t pack_p_bf16(float low, float high) {
  return __builtin_amdgcn_perm(mla::bit_cast<uint32_t>(high) + 0x8000, mla::bit_cast<uint32_t>(low) + 0x8000,
                               0x07060302);
}

MLA_DEVICE uint32_t pack_fp16(float low, float high) {
  const _Float16 l = static_cast<_Float16>(low);
  const _Float16 h = static_cast<_Float16>(high);
  return static_cast<uint32_t>(mla::bit_cast<uint16_t>(h)) << 16 | mla::bit_cast<uint16_t>(l);
}

// Converts two of four fp8 values (e4m3 in the arch's flavour).
MLA_DEVICE f32x2 fp8_pair_to_f32(uint32_t four, bool upper) {
  return upper ? __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), true)
               : __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), false);
}

// Rounds four values to fp8, to nearest even.
MLA_DEVICE uint32_t pack_fp8(f32x4 x) {
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(x[0], x[1], 0, false);
  return static_cast<uint32_t>(__builtin_amdgcn_cvt_pk_fp8_f32(x[2], x[3], low, true));
}
MLA_DEVICE float sum_of_fp8(uint32_t four) {
  const f32x2 pair = fp8_pair_to_f32(four, false) + fp8_pair_to_f32(four, true);
  return pair[0] + pair[1];
}

}  // namespace cdna
