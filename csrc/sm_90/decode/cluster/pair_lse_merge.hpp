// The LSE merge of two KV splits of a sequence that two CTAs of a cluster hold: both QK warpgroups compute it from the
// row maxima and sums that they send each other, while the last products run. Of four splits, two pairs merge likewise.
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

// A row's max and sum in two parts of its keys, and what O of each part is multiplied by to have the common max.
struct MergedRow {
  float max, sum;
  float own, own_part;  // the factor, and what the part adds to the sum
  float peer, peer_part;

  MLA_DEVICE MergedRow(float own_max, float own_sum, float peer_max, float peer_sum) {
    max = fmaxf(own_max, peer_max);
    own = exp2_approx(own_max - max);
    peer = exp2_approx(peer_max - max);
    own_part = own * own_sum;
    peer_part = peer * peer_sum;
    sum = own_part + peer_part;
  }
};

template <class Traits>
struct PairOffsets {
  static constexpr int PEER_MAX = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, peer_max);
  static constexpr int PEER_SUM = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, peer_sum);
  static constexpr int SCALE = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, scale);
  static constexpr int LSE = SharedStorage<Traits>::CLUSTER_PART + __builtin_offsetof(PairStorage, lse);
};

// Sends a max and a sum of each of this thread's rows to the peer that is APART, whose mbarrier `full` counts them.
template <int APART>
MLA_DEVICE void send_stats(uint32_t max_at, uint32_t full, const float (&row_max)[2], const float (&sum)[2], bool leads) {
  const uint32_t there = map_to_peer<APART>(max_at);
  const uint32_t full_there = map_to_peer<APART>(full);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!leads) continue;
    peer_store_async(there + half * 32, bit_cast<uint32_t>(row_max[half]), full_there);
    peer_store_async(there + half * 32 + BLOCK_M * 4, bit_cast<uint32_t>(sum[half]), full_there);
  }
}

// From the running max and sum of this thread's rows in this CTA's split, and the peer's in its own: the scales of both
// splits' O, which is not divided by anything yet nor multiplied by the scale of the values, and the rows' lse. The
// sink counts where the splits are all of their sequence, `whole`. It uses the approximations that P is computed with,
// because the epilogue waits for it.
template <class Traits>
MLA_DEVICE void pair_lse_merge(const typename Traits::Params& params, uint32_t shared, const float (&row_max)[2],
                               const float (&sum)[2], float value_scale, bool whole) {
  using Offsets = PairOffsets<Traits>;
  using Cluster = typename Traits::Cluster;
  const Mbarriers<Traits> barriers(shared);
  const bool leads = warpgroup_thread() % 4 == 0;
  const uint32_t at = shared + quad_row() * 4;  // and 8 rows further on
  send_stats<Cluster::SPLITS_APART>(at + Offsets::PEER_MAX, ClusterPair::peer_stats_full(barriers), row_max, sum, leads);
  mbarrier_wait(ClusterPair::peer_stats_full(barriers), 0);
  const auto merged = [&](int half) {
    const uint32_t row_at = at + half * 32;
    return MergedRow(row_max[half], sum[half], ld_shared<float>(row_at + Offsets::PEER_MAX),
                     ld_shared<float>(row_at + Offsets::PEER_SUM));
  };
  const auto finish = [&](int half, const MergedRow& row) {
    const uint32_t row_at = at + half * 32;
    float denominator = row.sum;
    if (row.sum != 0.0f && whole && params.attn_sink != nullptr)  // NaN included
      denominator += sink_term(params, half, row.max);
    const float inverse = __fdividef(value_scale, denominator);
    if (!leads) return;
    st_shared(row_at + Offsets::SCALE, merge_scale(row.own, row.own_part, inverse));
    st_shared(row_at + Offsets::SCALE + BLOCK_M * 4, merge_scale(row.peer, row.peer_part, inverse));
    st_shared(row_at + Offsets::LSE, lse_of_row(row.max, row.sum));
  };
  if constexpr (Cluster::REDUCES_FOUR) {
    MergedRow rows[2] = {merged(0), merged(1)};
    Cluster::merge_neighbour(barriers, at + Offsets::SCALE, rows, leads);
    for (int half = 0; half < 2; ++half) finish(half, rows[half]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) finish(half, merged(half));
  }
  mbarrier_arrive(ClusterPair::scales_ready(barriers));
}

}  // namespace mla::sm_90
