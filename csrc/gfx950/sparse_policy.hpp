// How sparse decode turns stored fp8 values into the bf16 that is multiplied, on gfx950; see dequant_piece.
#pragma once

#include "gfx950/policy.hpp"

namespace gfx950 {

// Multiplies OCP e4m3 by a power of two: exact while the result is a normal number. Only the exponent of the scale
// counts; that of NaN gives NaN.
struct Pow2Dequant {
  float scale;

  MLA_DEVICE static uint32_t from_e8m0(uint32_t byte) { return byte << 23; }
  MLA_DEVICE static uint32_t from_fp32(uint32_t bits) { return bits; }
  MLA_DEVICE cdna::u32x4 prepared(cdna::u32x4 values) const { return values; }
  MLA_DEVICE uint32_t low(uint32_t four) const { return times_scale<false>(four); }
  MLA_DEVICE uint32_t high(uint32_t four) const { return times_scale<true>(four); }

 private:
  template <bool upper>
  MLA_DEVICE uint32_t times_scale(uint32_t four) const {
    return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(four, scale, upper));
  }
};

// Multiplies OCP e4m3 by any scale, rounded once.
struct ScaleDequant {
  float scale;

  MLA_DEVICE static uint32_t from_fp32(uint32_t bits) { return bits; }
  MLA_DEVICE cdna::u32x4 prepared(cdna::u32x4 values) const { return values; }
  MLA_DEVICE uint32_t low(uint32_t four) const { return times_scale<false>(four); }
  MLA_DEVICE uint32_t high(uint32_t four) const { return times_scale<true>(four); }

 private:
  template <bool upper>
  MLA_DEVICE uint32_t times_scale(uint32_t four) const {
    typedef float Pair __attribute__((ext_vector_type(2)));
    typedef __bf16 Rounded __attribute__((ext_vector_type(2)));
    const Pair values = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), upper);
    return __builtin_bit_cast(uint32_t, __builtin_convertvector(values * Pair{scale, scale}, Rounded));
  }
};

// Multiplies e2m1 by an e4m3 scale, exactly.
struct Fp4Dequant {
  float scale;

  MLA_DEVICE static uint32_t prepared_scales(uint32_t four) { return four; }
  MLA_DEVICE explicit Fp4Dequant(uint32_t code)
      : scale(__builtin_amdgcn_cvt_f32_fp8(static_cast<int>(code), 0)) {}

  MLA_DEVICE cdna::u32x4 eight(uint32_t codes) const {
    return cdna::u32x4{pair<0>(codes), pair<1>(codes), pair<2>(codes), pair<3>(codes)};
  }

 private:
  template <int byte>
  MLA_DEVICE uint32_t pair(uint32_t codes) const {
    typedef float Pair __attribute__((ext_vector_type(2)));
    typedef __bf16 Rounded __attribute__((ext_vector_type(2)));
    const Pair values = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(codes, 1.0f, byte);
    return __builtin_bit_cast(uint32_t, __builtin_convertvector(values * Pair{scale, scale}, Rounded));
  }
};

}  // namespace gfx950
