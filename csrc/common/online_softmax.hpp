// Softmax of a row whose keys arrive tile by tile, in base 2.
//
// A row keeps a running max and the sum of 2^(t - max) over its keys, t = score * softmax_scale * log2(e) with
// softmax_scale > 0. The rescale is lazy: the running max is raised only when a key exceeds it by more than
// RESCALE_THRESHOLD. Until then every P stays below 2^RESCALE_THRESHOLD, which a float sum and a 16-bit P hold without
// loss, and the accumulated output is not rescaled. A row's result depends on its own sequence alone, so it stays
// bitwise reproducible.
#pragma once

#include "common/device.hpp"
#include "common/logarithm.hpp"

namespace mla {

constexpr float MINUS_INFINITY = -__builtin_huge_valf();

struct RowSoftmax {
  static constexpr float RESCALE_THRESHOLD = 8.0f;  // an exponent of 2
  // The running max of a row that has seen no key. It is finite, so that a masked score gives 2^(-inf - LOWEST) = 0 and
  // never inf - inf.
  static constexpr float LOWEST = -1e30f;

  float max;
  float sum;

  MLA_DEVICE static RowSoftmax empty() { return RowSoftmax{LOWEST, 0.0f}; }
  MLA_DEVICE bool exceeded_by(float t) const { return t > max + RESCALE_THRESHOLD; }
};

// A finished row: `scale` turns the accumulated output into the softmax average (0 for a row without keys), `lse` is
// its natural log-sum-exp (-inf for a row without keys).
template <class Policy>
struct RowResult {
  float scale;
  float lse;

  MLA_DEVICE static RowResult of(float max, float sum) {
    // Compared by its bits, so that the sum of a row with a NaN among its keys counts and stays NaN.
    const bool any = bit_cast<uint32_t>(sum) != 0;
    return RowResult{any ? Policy::reciprocal(sum) : 0.0f, any ? (max + Policy::log2(sum)) * LN_2 : MINUS_INFINITY};
  }

  // The sink is one more key of value 0: it lowers the scale of the output and does not change lse.
  MLA_DEVICE void add_sink(float sink) {
    if (scale > 0.0f) scale *= Policy::reciprocal(1.0f + Policy::exp2((sink - lse) * LOG2_E));
  }
};

}  // namespace mla
