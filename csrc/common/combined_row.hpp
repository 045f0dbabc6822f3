// The result that follows from a row's log-sum-exps and its sink: what kind it is, its scale, its log-sum-exp.
#pragma once

#include "common/logarithm.hpp"
#include "common/lse_merge.hpp"

namespace mla {

template <class Wave>
struct CombinedRow {
  // A row is the weighted sum of its splits, or zero, or NaN; only the first reads a partial.
  enum Outcome { SUM, ZERO, NOT_A_NUMBER };

  MLA_DEVICE static Outcome outcome_of(const LseAccum& row) {
    if (row.largest >= ORDERED_INFINITY) return NOT_A_NUMBER;
    return row.largest == ORDERED_MINUS_INFINITY ? ZERO : SUM;
  }
  MLA_DEVICE static Outcome outcome_of(const LseAccum& row, float sink) {
    const Outcome without = outcome_of(row);
    if (float_to_ordered_int(sink) == ORDERED_INFINITY && row.largest <= ORDERED_INFINITY) return ZERO;
    return without == SUM && float_to_ordered_int(sink) > ORDERED_INFINITY ? NOT_A_NUMBER : without;
  }

  // The factor of every weight e^(lse - largest) of a row.
  MLA_DEVICE static float scale_of(const LseAccum& row) { return reciprocal(row.sum); }
  // 1 / (sum + e^(sink - largest)), scaled so that nothing overflows. For rows whose outcome is SUM.
  MLA_DEVICE static float scale_of(const LseAccum& row, float sink) {
    const float largest = ordered_int_to_float(row.largest);
    const float above = __builtin_fmaxf(sink, largest);
    const float share = exp_of<Wave>(largest - above);
    return share * reciprocal(__builtin_fmaf(row.sum, share, exp_of<Wave>(sink - above)));
  }
  // One step of Newton's method; of 1 exactly 1, so that a single split passes through unchanged.
  MLA_DEVICE static float reciprocal(float x) {
    const float guess = Wave::reciprocal(x);
    return __builtin_fmaf(guess, __builtin_fmaf(-x, guess, 1.0f), guess);
  }

  MLA_DEVICE static float lse_of_row(const LseAccum& row) {
    if (row.largest >= ORDERED_INFINITY || row.largest == ORDERED_MINUS_INFINITY)
      return ordered_int_to_float(row.largest);
    return __builtin_fmaf(Wave::log2(row.sum), LN_2, ordered_int_to_float(row.largest));
  }
};

}  // namespace mla
