// Softmax of a row whose keys arrive tile by tile, in base 2.
//
// A row keeps a reference `max` and the sum of 2^(t - max) over its keys, t = score * softmax_scale * log2(e) with
// softmax_scale > 0. The reference is renewed only when a key exceeds it by more than LAG: until then the weights stay
// below 2^LAG, which a float sum and a 16-bit weight hold without loss, and the accumulated output needs no rescaling.
// A row's result depends on its own sequence alone, so it stays bitwise reproducible.
#pragma once

#include "common/device.hpp"
#include "common/logarithm.hpp"

namespace mla {

constexpr float MINUS_INFINITY = -__builtin_huge_valf();

struct RowSoftmax {
  static constexpr float LAG = 8.0f;
  // Finite, so that a row which has seen no key yet has weight 2^(-inf - NOTHING) = 0 and never inf - inf.
  static constexpr float NOTHING = -1e30f;

  float max;
  float sum;

  MLA_DEVICE static RowSoftmax empty() { return RowSoftmax{NOTHING, 0.0f}; }
  MLA_DEVICE bool exceeded_by(float t) const { return t > max + LAG; }
};

// The merged row: `weight` turns the unnormalised output into the softmax average (0 for an empty row),
// `lse` is its natural log-sum-exp (-inf for an empty row).
template <class Policy>
struct RowResult {
  float weight;
  float lse;

  MLA_DEVICE static RowResult of(float max, float sum) {
    // By its bits, so that the sum of a row with a NaN among its keys counts, and stays NaN.
    const bool any = bit_cast<uint32_t>(sum) != 0;
    return RowResult{any ? Policy::reciprocal(sum) : 0.0f, any ? (max + Policy::log2(sum)) * LN_2 : MINUS_INFINITY};
  }

  // The sink is one more key of value 0: it thins out the output and leaves lse alone.
  MLA_DEVICE void add_sink(float sink) {
    if (weight > 0.0f) weight *= Policy::reciprocal(1.0f + Policy::exp2((sink - lse) * LOG2_E));
  }
};

}  // namespace mla
