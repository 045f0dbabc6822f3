// What one of two cuts of a row counts beside the other, by combine's arithmetic.
#pragma once

#include "mla/combine.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm90 {

struct Share {
  float own;   // of the cut that asks
  float peer;  // of the other
  float lse;   // of the row

  // From the log-sum-exps of both. `sink` is the row's, or null.
  MLA_DEVICE Share(float own_lse, float peer_lse, const float* sink) {
    Merged row{Merge::max_of(order_of(own_lse), order_of(peer_lse)), 0.0f};
    own = exp_of<Wave>(own_lse - row.base());
    peer = exp_of<Wave>(peer_lse - row.base());
    row.sum = own + peer;
    const auto outcome = sink == nullptr ? Merge::outcome_of(row) : Merge::outcome_of(row, *sink);
    const float scale = sink == nullptr ? Merge::scale_of(row) : Merge::scale_of(row, *sink);
    own *= scale;
    peer *= scale;
    if (outcome == Merge::ZERO) own = peer = 0.0f;
    if (outcome == Merge::NOT_A_NUMBER) own = peer = Wave::not_a_number();
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
