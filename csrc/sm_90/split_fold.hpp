// The fold of a node: the results of up to NODE_SPLITS neighbouring splits of a row, added one after the other. A CTA that
// holds all splits of a node folds them as it goes (decode/fold.hpp), and combine folds those that lie apart
// (combine/fold_combine.hpp), with the same arithmetic. So results have the same bits either way.
//
// A split's result is divided by its own sum, and has a log-sum-exp. Results count relative to a base: the log-sum-exp of
// the first split, or of a later one that exceeds the base by more than MOST_ABOVE, before which all that was added so far
// is scaled down. So a result is scaled as it is added, and what lies in memory nearly always stays as it is.
#pragma once

#include "common/combined_row.hpp"
#include "sm_90/ptx/math.hpp"

namespace mla::sm_90 {

constexpr int NODE_SPLITS = 16;  // archs/sm_90/costs.py has it, too

struct SplitFold {
  struct Functions {  // as Wave has them
    MLA_DEVICE static float exp2(float x) { return exp2_with_denormals(x); }
    MLA_DEVICE static float reciprocal(float x) { return reciprocal_approx(x); }
  };
  static constexpr float MOST_ABOVE = 3.0f;

  float base = -bit_cast<float>(INFINITY_BITS);
  float sum = 0.0f;  // of e^(lse - base)

  // Adds a split: its result counts `factor` times, and what was added before it `before` times. A result that counts 0
  // times is not looked at, whatever it is.
  MLA_DEVICE void add(float lse, float& before, float& factor) {
    before = factor = 1.0f;
    if (float_to_ordered_int(lse) > float_to_ordered_int(base + MOST_ABOVE)) {
      before = exp_of<Functions>(base - lse);
      base = lse;
    } else {
      factor = exp_of<Functions>(lse - base);
    }
    sum = __builtin_fmaf(sum, before, factor);
  }

  // The node's log-sum-exp, and the factor of the sum of all results.
  MLA_DEVICE float lse() const {
    return sum == 0.0f ? -bit_cast<float>(INFINITY_BITS) : __builtin_fmaf(log2_approx(sum), LN_2, base);
  }
  MLA_DEVICE float scale() const { return sum == 0.0f ? 0.0f : CombinedRow<Functions>::reciprocal(sum); }

  // The term of a split's result; -0 changes no sum.
  MLA_DEVICE static float term(float value, float factor) { return factor == 0.0f ? -0.0f : value * factor; }
  // A sum with a term added, as memory adds it. A sum begins as -0.
  MLA_DEVICE static float added(float sum, float before, float term) {
    return add_without_subnormals(sum * before, term);
  }
};

}  // namespace mla::sm_90
