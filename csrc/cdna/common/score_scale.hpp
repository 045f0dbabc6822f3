// The factor of scores, with the descales of queries and cache.
#pragma once

#include "cdna/common/types.hpp"
#include "common/kv_format.hpp"
#include "common/problem.hpp"

namespace cdna {

// Returns the factor that turns a score into an exponent of 2: softmax_scale times log2(e), q_descale and, where the
// format has one, kv_descale. softmax_scale is positive and no descale is negative, but a descale may be 0 (a tensor of
// zeros): then 0 times a masked score of -inf would be NaN, so a tiny factor takes its place.
template <class Format, class Params>
MLA_DEVICE float score_scale(const Params& p) {
  constexpr float tiny = 1e-30f;
  const float scale = p.softmax_scale * mla::LOG2_E;
  if (!Format::descaled && p.q_descale == nullptr) return scale;
  float descaled = scale * mla::descale(p.q_descale);
  if constexpr (Format::descaled) descaled *= mla::descale(p.kv_descale);
  const uint32_t bits = opaque(mla::bit_cast<uint32_t>(descaled));  // a comparison of floats would take NaN for 0
  return bits << 1 == 0 ? tiny : mla::bit_cast<float>(bits);
}

}  // namespace cdna
