// The results of two KV splits that the two CTAs of a cluster merge: what the PV warpgroups of all such modes need.
#pragma once

#include "sm_90/decode/cluster/pair_lse_merge.hpp"
#include "sm_90/decode/epilogue.hpp"

namespace mla::sm_90 {

// The scales of this thread's rows in the CTA's own split, 0, or in the peer's, 1; valid after `scales_ready`.
template <class Traits>
MLA_DEVICE void load_merge_scales(uint32_t shared, int split, float (&scale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    scale[half] =
        ld_shared<float>(shared + PairOffsets<Traits>::SCALE + (split * BLOCK_M + quad_row() + half * 8) * 4);
}

using PairO = AccumulatorO<WIDEST_HEAD_DIM_V / 2>;

// Zeros the rows of O that contribute nothing. They are rare.
MLA_DEVICE void clear_no_contribution(PairO& o, const float (&scale)[2]) {
  const bool none[2] = {is_no_contribution(scale[0]), is_no_contribution(scale[1])};
  if (__builtin_expect(!__any_sync(~0u, none[0] || none[1]), 1)) return;
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (none[i / 2 % 2]) o[0][i] = o[1][i] = 0.0f;
}

// The only work tile of a CTA, whose number is the CTA's; and the cluster's one result or partial, once it is merged.
template <class Traits>
MLA_DEVICE OutputTarget find_only_rows(const typename Traits::Params& params, const Epilogue<Traits>& epilogue) {
  const int number = static_cast<int>(blockIdx.y);
  const int sequence = Traits::Problem::sequence_of_split(params, number);
  constexpr int SPLITS = Traits::Cluster::SPLITS;
  return epilogue.find_rows(sequence, params.num_splits == SPLITS ? -1 : number / SPLITS);
}

}  // namespace mla::sm_90
