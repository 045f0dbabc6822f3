// What each of two cuts of a sequence counts, where the two blocks of a cluster have one each: the scores of both find
// it from what they tell each other, while the last products are computed.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/quad.hpp"
#include "sm_90/results.hpp"
#include "sm_90/shared_copies.hpp"

namespace mla::sm90 {

// What results are multiplied by that count nothing, whatever they are. No product of weights is it.
constexpr float NOTHING = -0.0f;
MLA_DEVICE bool is_nothing(float weight) { return bit_cast<uint32_t>(weight) == bit_cast<uint32_t>(NOTHING); }

// Of a cut whose sum times `factor` is `part` of the denominator.
MLA_DEVICE float weight_of(float factor, float part, float inverse) {
  const float weight = part == 0.0f ? 0.0f : factor * inverse;
  return weight == 0.0f ? NOTHING : weight;
}

// From the references and sums of this thread's rows in this block's cut, and the peer's in its own: what both cuts'
// results, which are not divided by anything yet, are multiplied by, and the rows' lse. By the approximations that
// probabilities are computed with, because results wait for it.
template <class Policy>
MLA_DEVICE void weigh_cuts(const typename Policy::Params& params, uint32_t shared, const float (&reference)[2],
                           const float (&sum)[2]) {
  const Barriers<Policy> barriers(shared);
  const bool leads = group_thread() % 4 == 0;
  const uint32_t at = shared + quad_row() * 4;  // and 8 rows further on
  const uint32_t there = at_peer(at + Policy::PEER_ROWS), sent = at_peer(barriers.rows_sent());
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!leads) continue;
    peer_store4(there + half * 32, bit_cast<uint32_t>(reference[half]), sent);
    peer_store4(there + half * 32 + ROWS * 4, bit_cast<uint32_t>(sum[half]), sent);
  }
  barrier_wait(barriers.rows_sent(), 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row_at = at + half * 32;
    const float peer_reference = load_shared<float>(row_at + Policy::PEER_ROWS);
    const float peer_sum = load_shared<float>(row_at + Policy::PEER_ROWS + ROWS * 4);
    const float common = fmaxf(reference[half], peer_reference);
    const float own = exp2_fast(reference[half] - common), peer = exp2_fast(peer_reference - common);
    const float own_part = own * sum[half], peer_part = peer * peer_sum, both = own_part + peer_part;
    float denominator = both;
    if (both != 0.0f && params.num_splits == 2 && params.attn_sink != nullptr)  // NaN included
      denominator += sink_part(params, half, common);
    const float inverse = __fdividef(1.0f, denominator);
    if (!leads) continue;
    store_shared(row_at + Policy::WEIGHTS, weight_of(own, own_part, inverse));
    store_shared(row_at + Policy::WEIGHTS + ROWS * 4, weight_of(peer, peer_part, inverse));
    store_shared(row_at + Policy::BOTH_LSE, lse_of_row(common, both));
  }
  barrier_arrive(barriers.weighed());
}

// What the results of this thread's rows count in this block's cut, 0, or in the peer's, 1; once it is known.
template <class Policy>
MLA_DEVICE void load_weights(uint32_t shared, int cut, float (&weight)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    weight[half] = load_shared<float>(shared + Policy::WEIGHTS + (cut * ROWS + quad_row() + half * 8) * 4);
}

// Takes the rows that count nothing out of what a thread holds. Few do.
MLA_DEVICE void clear_nothing(Products& o, const float (&weight)[2]) {
  const bool none[2] = {is_nothing(weight[0]), is_nothing(weight[1])};
  if (__builtin_expect(!__any_sync(~0u, none[0] || none[1]), 1)) return;
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (none[i / 2 % 2]) o[0][i] = o[1][i] = 0.0f;
}

}  // namespace mla::sm90
