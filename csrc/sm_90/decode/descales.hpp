// The factors that dequantise queries and rows: they belong to the scores and to the results.
#pragma once

#include "sm_90/decode/softmax.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

// A factor, or 1 where there is none, without a load.
MLA_DEVICE float descale(const float* value) { return value == nullptr ? 1.0f : ld_global(value); }

// What scores are multiplied by: `softmax_scale` and the factors of queries and rows.
template <class Traits, class Params>
MLA_DEVICE float score_scale(const Params& params, float softmax_scale) {
  float scale = softmax_scale * descale(params.q_descale);
  if constexpr (Traits::HAS_KV_DESCALE) scale *= descale(params.kv_descale);
  return nonzero_scale(scale);
}

// What values are multiplied by.
template <class Traits, class Params>
MLA_DEVICE float value_scale(const Params& params) {
  if constexpr (Traits::HAS_KV_DESCALE)
    return descale(params.kv_descale);
  else
    return 1.0f;
}

}  // namespace mla::sm_90
