// The factor of scores, with the descales of queries and cache.
#pragma once

#include "cdna/common/kernel_params.hpp"
#include "cdna/common/types.hpp"
#include "common/kv_format.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"
#include "common/read_constant.hpp"

namespace cdna {

// A factor that may be absent: then it is 1, and what lies at `readable` is read in its place. A branch instead would
// wait for memory by itself.
struct Descale {
  const float* factor;
  uint32_t bits;

  MLA_DEVICE static Descale read(const float* factor, const void* readable) {
    return Descale{factor, mla::read_constant(static_cast<const uint32_t*>(factor ? factor : readable))};
  }
  MLA_DEVICE float value() const { return factor ? mla::bit_cast<float>(bits) : 1.0f; }
};

// Returns the factor that turns a score into an exponent of 2: softmax_scale times log2(e), q_descale and, where the
// format has one, kv_descale. softmax_scale is positive and no descale is negative, but a descale may be 0 (a tensor of
// zeros): then 0 times a masked score of -inf would be NaN, so a tiny factor takes its place.
template <class Format, class Params>
MLA_DEVICE float score_scale(const Params& p) {
  constexpr float tiny = 1e-30f;
  const float scale = p.softmax_scale * mla::LOG2_E;
  if (!Format::descaled && p.q_descale == nullptr) return scale;
  const Descale q = Descale::read(p.q_descale, p.q);
  const Descale kv = Format::descaled ? Descale::read(p.kv_descale, p.q) : q;
  loaded(q.bits, kv.bits);
  float descaled = scale * q.value();
  if constexpr (Format::descaled) descaled *= kv.value();
  const uint32_t bits = opaque(mla::bit_cast<uint32_t>(descaled));  // a comparison of floats would take NaN for 0
  return bits << 1 == 0 ? tiny : mla::bit_cast<float>(bits);
}

}  // namespace cdna
