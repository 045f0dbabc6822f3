// The Policy of gfx942 (CDNA3): the sizes, conversions and elementary functions that the kernels in csrc/cdna take from
// the arch.
#pragma once

#include "cdna/common/convert.hpp"
#include "cdna/common/elementary.hpp"
#include "cdna/common/mfma_16x16x16.hpp"

namespace gfx942 {

struct Policy : cdna::Elementary {
  static constexpr int waves = 4;  // one per SIMD: a wave may use all 512 registers of its lanes
  static constexpr int lds_bytes = 65536;
  static constexpr bool loads_params_together = true;  // of a work tile: one wait for memory instead of one for each
  static constexpr bool spares_lds_reads = true;  // rows over waves: three of them read keys at 80 and 96 rows

  // Return two values rounded to Element, the first in the low half: to nearest even for results, and by a cheaper
  // rounding for P (this arch has no bf16 conversion).
  template <class Element>
  MLA_DEVICE static uint32_t pack(float low, float high);
  template <class Element>
  MLA_DEVICE static uint32_t pack_p(float low, float high);
  // Returns a factor of values that are packed, in a form that keeps every NaN.
  MLA_DEVICE static float factor(float x) { return cdna::roundable(x); }

};

template <>
MLA_DEVICE uint32_t Policy::pack<mla::bf16>(float low, float high) {
  return cdna::pack_bf16(low, high);
}
template <>
MLA_DEVICE uint32_t Policy::pack<mla::fp16>(float low, float high) {
  return cdna::pack_fp16(low, high);
}
template <>
MLA_DEVICE uint32_t Policy::pack_p<mla::bf16>(float low, float high) {
  return cdna::pack_p_bf16(low, high);
}
template <>
MLA_DEVICE uint32_t Policy::pack_p<mla::fp16>(float low, float high) {
  return cdna::pack_fp16(low, high);
}

}  // namespace gfx942
