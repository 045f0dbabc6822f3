// The two rows of S that a QK thread holds a part of: which keys they see, their running max and sum, and what becomes of
// them at the end of a tile.
#pragma once

#include "sm_90/decode/descales.hpp"
#include "sm_90/decode/query_rows.hpp"
#include "sm_90/decode/softmax.hpp"

namespace mla::sm_90 {

template <class Traits>
class QkRows {
 protected:
  using Params = typename Traits::Params;
  static constexpr bool SELECTED = Traits::SELECTED;

  MLA_DEVICE explicit QkRows(const Params& params) : params_(params), scale_(params.softmax_scale * LOG2_E) {}

  // The scale of a score of this thread's first or second row.
  MLA_DEVICE float scale_of(int half) const { return Traits::SCALES_Q ? row_scale_[half] : scale_; }

  // How many keys this thread's rows see.
  MLA_DEVICE void find_key_limits() {
    const Queries queries(params_, tile_.sequence);
    const Heads heads(params_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRow row(heads, queries, first_row() + quad_row() + half * 8);
      if constexpr (!SELECTED) key_limit_[half] = row.key_limit(params_, queries, tile_);
      // Data in rows without a query may not raise the running max of the warp's other rows.
      if (!row.valid) row_max_[half] = INFINITE;
    }
    if constexpr (!SELECTED)
      common_limit_ = common_limit(params_, heads, queries, tile_, first_row(),
                                   tile_.template first_stage<Traits::SPLIT_ALIGNMENT>());
  }

  // Scores of keys that a row does not see become -inf.
  MLA_DEVICE void mask(float (&s)[SCORES], int first) {
    if constexpr (SELECTED) {
      mask_absent(s, present_);
    } else if (__builtin_expect(first + BLOCK_N > common_limit_, 0)) {
      mask_unseen(s, first, key_limit_);
      if (has_window_or_tree(params_)) mask_window_or_tree(s, first);
    }
  }

  // The same for a window or a tree. Behind the last row's first key a window masks no more.
  MLA_DEVICE void mask_window_or_tree(float (&s)[SCORES], int first) {
    const Queries queries(params_, tile_.sequence);
    const Heads heads(params_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRow row(heads, queries, first_row() + quad_row() + half * 8);
      mask_absent(s, row.seen_bits(params_, queries, tile_.length, first), half);
    }
    common_limit_ = common_limit(params_, heads, queries, tile_, first_row(), first + BLOCK_N);
  }

  // Raises the running max of this warp's rows to their largest scores so far; `factor` rescales O and the row sums.
  MLA_DEVICE void raise_row_max(const float (&s)[SCORES], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(row_max_[half], quad_max(largest_score(s, half)) * scale_of(half));
      factor[half] = exp2_approx(row_max_[half] - raised);
      row_max_[half] = raised;
      row_sum_[half] *= factor[half];
    }
  }

  // The scale of the values. It is loaded anew for every tile, because there is no register to keep it in.
  MLA_DEVICE float scale_of_values() const { return value_scale<Traits>(params_); }

  // The scale of the values / denominator of this thread's rows, and their lse without the sink.
  MLA_DEVICE void finish_rows(float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(row_sum_[half]);
      const bool any = sum != 0.0f;  // NaN included
      float denominator = sum;
      if (any && tile_.partial_row < 0 && params_.attn_sink != nullptr)
        denominator += sink_term(params_, half, row_max_[half]);
      inverse[half] = any ? __fdividef(scale_of_values(), denominator) : 0.0f;
      lse[half] = lse_of_row(row_max_[half], sum);
    }
  }

  const Params& params_;
  float scale_;
  WorkTile tile_;
  int key_limit_[2];    // one past the last key that this thread's rows see; like the next, unused in sparse decode
  int common_limit_;    // one past the last key that every row of the block sees
  uint32_t present_;    // used only in sparse decode: a bit for each key of the stage whose scores come next
  float row_scale_[2];  // used only with SCALES_Q: the scales of this thread's rows
  float row_max_[2];    // the running max of this thread's rows, in units of log2
  float row_sum_[2];
};

}  // namespace mla::sm_90
