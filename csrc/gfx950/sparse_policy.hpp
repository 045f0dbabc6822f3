// The Policy of sparse decode on gfx950: how stored fp8 values become the bf16 that is multiplied.
#pragma once

#include "gfx950/policy.hpp"

namespace gfx950 {

struct SparsePolicy : Policy {
  // Multiplies two of four fp8 values (OCP e4m3) by a power of two, to bf16: exact while the result is a normal number.
  // Only the exponent of `scale` counts; that of NaN gives NaN.
  template <bool upper>
  MLA_DEVICE static uint32_t fp8_pair_times_pow2(uint32_t four, float scale) {
    return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(four, scale, upper));
  }

  // Multiplies two of four fp8 values by any scale, rounded once.
  template <bool upper>
  MLA_DEVICE static uint32_t fp8_pair_times_scale(uint32_t four, float scale) {
    typedef float Pair __attribute__((ext_vector_type(2)));
    typedef __bf16 Rounded __attribute__((ext_vector_type(2)));
    const Pair values = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), upper);
    return __builtin_bit_cast(uint32_t, __builtin_convertvector(values * Pair{scale, scale}, Rounded));
  }
};

}  // namespace gfx950
