// How gfx950 turns stored values into the bf16 that sparse_decode multiplies.
#pragma once

#include "gfx950/policy.hpp"

namespace gfx950 {

struct SparsePolicy : Policy {
  // Two of four fp8 values (OCP e4m3) times a power of two, as bf16: exactly, while the result is a normal number. Only
  // the exponent of `scale` counts; that of NaN gives NaN.
  template <bool upper>
  MLA_DEVICE static uint32_t fp8_pair_times_pow2(uint32_t four, float scale) {
    return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(four, scale, upper));
  }

  // The same with any scale, rounded once.
  template <bool upper>
  MLA_DEVICE static uint32_t fp8_pair_times_scale(uint32_t four, float scale) {
    typedef float Pair __attribute__((ext_vector_type(2)));
    typedef __bf16 Rounded __attribute__((ext_vector_type(2)));
    const Pair values = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), upper);
    return __builtin_bit_cast(uint32_t, __builtin_convertvector(values * Pair{scale, scale}, Rounded));
  }
};

}  // namespace gfx950
