// The fold of a node: the results of a few neighbouring splits of a row, added one after the other. A CTA that holds all
// splits of a node folds them as it goes, and combine folds those that lie apart; with the same arithmetic, so that
// results have the same bits either way.
//
// Each split has its own result, divided by its own sum, and its log-sum-exp. Results count relative to a base: the
// log-sum-exp of the first split, or of one that exceeds it by more than MOST_ABOVE, before which all that was added so
// far is scaled down. So a result is scaled as it is added, and what lies in memory stays as it is nearly always.
#pragma once

#include "common/combined_row.hpp"

namespace mla {

constexpr int NODE_SPLITS = 16;  // of a node at most; archs/sm_90/costs.py has it, too

template <class Wave>
struct SplitFold {
  static constexpr float MOST_ABOVE = 3.0f;

  float base = -bit_cast<float>(INFINITY_BITS);  // the log-sum-exp that results count relative to
  float sum = 0.0f;                               // of e^(lse - base)

  // Adds a split: its result counts `factor` times, and what was added before it `before` times. A result that counts 0
  // times is not looked at, whatever it is.
  MLA_DEVICE void add(float lse, float& before, float& factor) {
    before = factor = 1.0f;
    if (float_to_ordered_int(lse) > float_to_ordered_int(base + MOST_ABOVE)) {
      before = exp_of<Wave>(base - lse);
      base = lse;
    } else {
      factor = exp_of<Wave>(lse - base);
    }
    sum = __builtin_fmaf(sum, before, factor);
  }

  // The node's log-sum-exp, and the factor of all that was added.
  MLA_DEVICE float lse() const {
    return sum == 0.0f ? -bit_cast<float>(INFINITY_BITS) : __builtin_fmaf(Wave::log2(sum), LN_2, base);
  }
  MLA_DEVICE float scale() const { return sum == 0.0f ? 0.0f : CombinedRow<Wave>::reciprocal(sum); }

  // The term of a split's result; -0 changes no sum.
  MLA_DEVICE static float term(float value, float factor) { return factor == 0.0f ? -0.0f : value * factor; }
  // A sum with a term added, as memory adds it. A sum begins as -0.
  MLA_DEVICE static float added(float sum, float before, float term) {
    return Wave::add_as_memory(sum * before, term);
  }
};

}  // namespace mla
