// Two cuts of a sequence, merged by the two blocks of a cluster that computed them, without scratch and without
// combine.
//
// Each block keeps one side of the columns and sends the other's to its peer, 64 rows x 256 columns of fp32. So a
// values warpgroup either sends or merges, and what one thread sends, the same thread of the other block takes.
#pragma once

#include "mla/combine.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm90 {

// What this block's cut of a row counts beside its peer's, by combine's arithmetic.
struct Share {
  float weight;  // of the cut's result
  float lse;     // of the row

  // `sink` is the row's, or null.
  MLA_DEVICE Share(float own, float other, const float* sink) {
    Merged row{Merge::max_of(order_of(own), order_of(other)), 0.0f};
    const float own_share = exp_of<Wave>(own - row.base());
    row.sum = own_share + exp_of<Wave>(other - row.base());
    const auto outcome = sink == nullptr ? Merge::outcome_of(row) : Merge::outcome_of(row, *sink);
    weight = own_share * (sink == nullptr ? Merge::scale_of(row) : Merge::scale_of(row, *sink));
    if (outcome == Merge::ZERO) weight = 0.0f;
    if (outcome == Merge::NOT_A_NUMBER) weight = Wave::not_a_number();
    lse = Merge::lse_of_row(row);
  }

 private:
  struct Shape {
    static constexpr int head_dim_v = D_V, rows = 1, vec = 4, waves = 8, slices = 1;
  };
  using Wave = ::sm_90::Wave;
  using Merge = Combine<Wave, Shape>;
};

}  // namespace mla::sm90
