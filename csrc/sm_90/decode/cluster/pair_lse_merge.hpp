// The LSE merge of two KV splits of a sequence that the two CTAs of a cluster hold: both QK warpgroups compute it from
// the row maxima and sums that they send each other, while the last products run.
#pragma once

#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/decode/softmax.hpp"
#include "sm_90/ptx/dsmem.hpp"

namespace mla::sm_90 {

struct PairStorage {
  float peer_max[BLOCK_M];  // of the peer's split
  float peer_sum[BLOCK_M];
  float scale[2][BLOCK_M];  // what O of this CTA's split and of the peer's is multiplied by
  float lse[BLOCK_M];       // of both splits
  uint64_t peer_stats_full;  // peer_max and peer_sum have arrived
  uint64_t scales_ready;     // scale and lse are written
};

// The common part of the two cluster modes that merge two splits. Their `Storage` begins with a PairStorage.
struct ClusterPair : ClusterMode {
  static constexpr bool MERGES_SPLITS = true;
  static constexpr bool LATE_EPILOGUE = true;

  template <class Traits>
  MLA_DEVICE static uint32_t peer_stats_full(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(PairStorage, peer_stats_full));
  }
  template <class Traits>
  MLA_DEVICE static uint32_t scales_ready(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(PairStorage, scales_ready));
  }

  template <class Traits>
  MLA_DEVICE static void init_mbarriers(const Mbarriers<Traits>& barriers) {
    mbarrier_init(peer_stats_full(barriers), 1);
    mbarrier_expect_tx(peer_stats_full(barriers), 2 * BLOCK_M * 4);
    mbarrier_init(scales_ready(barriers), 128);  // the QK warpgroup
  }

  // The two CTAs do not meet again, because that would fence global memory, too. Each ends when it has waited for all
  // that the other does in its shared memory, and reads of it.
  MLA_DEVICE static void sync() { cluster_sync(); }
};

// The scale of a split that contributes nothing; its data is ignored even where it is NaN. No product of scales is -0.
constexpr float NO_CONTRIBUTION = -0.0f;
MLA_DEVICE bool is_no_contribution(float scale) {
  return bit_cast<uint32_t>(scale) == bit_cast<uint32_t>(NO_CONTRIBUTION);
}

// The scale of a split whose sum times `factor` is `part` of the denominator.
MLA_DEVICE float merge_scale(float factor, float part, float inverse) {
  const float scale = part == 0.0f ? 0.0f : factor * inverse;
  return scale == 0.0f ? NO_CONTRIBUTION : scale;
}

template <class Traits>
struct PairOffsets {
  static constexpr int PEER_MAX = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, peer_max);
  static constexpr int PEER_SUM = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, peer_sum);
  static constexpr int SCALE = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, scale);
  static constexpr int LSE = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, lse);
};

// From the running max and sum of this thread's rows in this CTA's split, and the peer's in its own: the scales of both
// splits' O, which is not divided by anything yet nor multiplied by the scale of the values, and the rows' lse. The
// sink counts where both splits are all of their sequence, `whole`. It uses the approximations that P is computed with,
// because the epilogue waits for it.
template <class Traits>
MLA_DEVICE void pair_lse_merge(const typename Traits::Params& params, uint32_t shared, const float (&row_max)[2],
                               const float (&sum)[2], float value_scale, bool whole) {
  using Offsets = PairOffsets<Traits>;
  const Mbarriers<Traits> barriers(shared);
  const bool leads = warpgroup_thread() % 4 == 0;
  const uint32_t at = shared + quad_row() * 4;  // and 8 rows further on
  constexpr int APART = Traits::Cluster::SPLITS_APART;
  const uint32_t there = map_to_peer<APART>(at + Offsets::PEER_MAX);
  const uint32_t full = map_to_peer<APART>(ClusterPair::peer_stats_full(barriers));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!leads) continue;
    peer_store_async(there + half * 32, bit_cast<uint32_t>(row_max[half]), full);
    peer_store_async(there + half * 32 + BLOCK_M * 4, bit_cast<uint32_t>(sum[half]), full);
  }
  mbarrier_wait(ClusterPair::peer_stats_full(barriers), 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row_at = at + half * 32;
    const float peer_max = ld_shared<float>(row_at + Offsets::PEER_MAX);
    const float peer_sum = ld_shared<float>(row_at + Offsets::PEER_SUM);
    const float common = fmaxf(row_max[half], peer_max);
    const float own = exp2_approx(row_max[half] - common), peer = exp2_approx(peer_max - common);
    const float own_part = own * sum[half], peer_part = peer * peer_sum, both = own_part + peer_part;
    float denominator = both;
    if (both != 0.0f && whole && params.attn_sink != nullptr)  // NaN included
      denominator += sink_term(params, half, common);
    const float inverse = __fdividef(value_scale, denominator);
    if (!leads) continue;
    st_shared(row_at + Offsets::SCALE, merge_scale(own, own_part, inverse));
    st_shared(row_at + Offsets::SCALE + BLOCK_M * 4, merge_scale(peer, peer_part, inverse));
    st_shared(row_at + Offsets::LSE, lse_of_row(common, both));
  }
  mbarrier_arrive(ClusterPair::scales_ready(barriers));
}

}  // namespace mla::sm_90
