// The Policy of gfx950 (CDNA4): the sizes, conversions and elementary functions that the kernels in csrc/cdna take from
// the arch.
#pragma once

#include "cdna/common/elementary.hpp"
#include "common/kv_format.hpp"

namespace gfx950 {

struct Policy : cdna::Elementary {
  static constexpr int waves = 4;  // one per SIMD: a wave may use all 512 registers of its lanes
  static constexpr int lds_bytes = 163840;
  static constexpr bool loads_params_together = true;  // of a work tile: one wait for memory instead of one for each
  static constexpr bool spares_lds_reads = false;

  // Return two values rounded to Element, to nearest even, the first in the low half.
  template <class Element>
  MLA_DEVICE static uint32_t pack(float low, float high);
  template <class Element>
  MLA_DEVICE static uint32_t pack_p(float low, float high) {
    return pack<Element>(low, high);
  }

  // Returns a factor of values that are packed, in a form that keeps every NaN.
  MLA_DEVICE static float factor(float x) { return x; }


  // Converts two of four fp8 values (OCP e4m3) to bf16, exactly.
  template <bool upper>
  MLA_DEVICE static uint32_t fp8_pair_to_bf16(uint32_t four) {
    return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(four, 1.0f, upper));
  }

  MLA_DEVICE static cdna::u32x4 fp8_to_bf16(cdna::u32x2 eight) {
    return cdna::u32x4{fp8_pair_to_bf16<false>(eight[0]), fp8_pair_to_bf16<true>(eight[0]),
                       fp8_pair_to_bf16<false>(eight[1]), fp8_pair_to_bf16<true>(eight[1])};
  }
};

template <>
MLA_DEVICE uint32_t Policy::pack<mla::bf16>(float low, float high) {
  typedef float Pair __attribute__((ext_vector_type(2)));
  typedef __bf16 Rounded __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, __builtin_convertvector(Pair{low, high}, Rounded));
}
template <>
MLA_DEVICE uint32_t Policy::pack<mla::fp16>(float low, float high) {
  typedef float Pair __attribute__((ext_vector_type(2)));
  typedef _Float16 Rounded __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, __builtin_convertvector(Pair{low, high}, Rounded));
}

}  // namespace gfx950
