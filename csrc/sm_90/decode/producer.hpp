// The base of every producer. A producer walks the tile scheduler, brings queries, and publishes work tiles to the QK
// warpgroup.
#pragma once

#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/decode/plan_pair.hpp"
#include "sm_90/decode/prologue_prefetch.hpp"
#include "sm_90/decode/tile_scheduler.hpp"
#include "sm_90/ptx/griddep.hpp"

namespace mla::sm_90 {

template <class Traits>
class ProducerBase {
 protected:
  using Params = typename Traits::Params;
  using Cluster = typename Traits::Cluster;
  using Storage = SharedStorage<Traits>;
  using KvState = PipelineState<Traits::STAGES>;
  using TileState = PipelineState<Traits::TILE_STAGES>;

 public:
  MLA_DEVICE ProducerBase(const Params& params, uint32_t shared)
      : params_(params), barriers_(shared), shared_(shared + Storage::KV) {}

 protected:
  // A stage of a ring of keys: its address, the mbarriers that say when it is full and empty, and their phase.
  struct Stage {
    uint32_t at;
    uint32_t full;
    uint32_t empty;
    uint32_t parity;
  };
  MLA_DEVICE Stage kv_stage(const KvState& kv) const {
    return {shared_ + kv.stage * Traits::STAGE_BYTES, barriers_.kv_full(kv.stage), barriers_.kv_empty(kv.stage),
            kv.parity};
  }

  MLA_DEVICE void wait_for_empty(const KvState& kv) const {
    mbarrier_wait(barriers_.kv_empty(kv.stage), kv.parity ^ 1);
  }

  // With ClusterShareKv, at the end of the list: the peer's readers arrive here as long as a stage is not empty, and
  // until then this CTA must not end.
  MLA_DEVICE void wait_for_peer_readers(KvState kv) const {
#pragma unroll 1
    for (int stage = 0; stage < Traits::STAGES; ++stage, kv.next()) wait_for_empty(kv);
  }

  // For TMA into a stage that may have held results, written by ordinary stores. The warps that stored them do not
  // fence, because the fence would wait for results on their way to memory.
  MLA_DEVICE static void wait_for_tma_stage(const Stage& stage) {
    mbarrier_wait(stage.empty, stage.parity ^ 1);
    fence_proxy_async();
  }

  // Which sequence comes first follows from parameters alone, unless a plan or ragged queries decide it. Then the
  // scheduler may start before the previous kernel has ended.
  MLA_DEVICE bool first_tile_in_memory() const { return params_.plan != nullptr || params_.cu_seqlens_q != nullptr; }

  // Waits for the previous kernel, on behalf of all roles. With a streaming combine, the warp that fills the partials
  // lets combine start; otherwise this does.
  MLA_DEVICE void wait_for_previous_kernel() const {
    griddep_wait();
    if (!Traits::combine_streams(params_)) griddep_launch_dependents();
  }

  // The work of the warp that prefetches before anything is loaded.
  MLA_DEVICE void prefetch() const {
    const ProloguePrefetch<Traits> prefetch(params_);
    prefetch.to_l2();
    if (params_.plan != nullptr) {
      griddep_wait();
      griddep_launch_dependents();
      prefetch.to_l1();
    }
  }

  // The scheduler of a role, which may read all that the previous kernel wrote from then on.
  template <class Scheduler>
  MLA_DEVICE Scheduler start_scheduler() const {
    const bool in_memory = first_tile_in_memory();
    if (in_memory) wait_for_previous_kernel();
    Scheduler scheduler = make_scheduler<Traits, Scheduler>(params_);
    if (!in_memory) wait_for_previous_kernel();
    return scheduler;
  }

  // The page table of the tile's sequence; null at the end of the list.
  template <class Scheduler>
  MLA_DEVICE const int32_t* pages_of(const Scheduler& scheduler) const {
    if (!scheduler.more()) return nullptr;
    const int sequence = scheduler.tile().sequence;
    return params_.page_ids + (params_.kv_indptr != nullptr ? ld_global(params_.kv_indptr + sequence)
                                                            : sequence * params_.page_ids_stride);
  }
  MLA_DEVICE int page_of(int key) const { return divided(key, params_.page_reciprocal, params_.page_shift); }
  // The key's place within its page, in 64 bits: a contiguous cache is one page, and its offsets pass 2^31 bytes.
  MLA_DEVICE int64_t in_page(int key, int in_table) const { return key - in_table * params_.page; }

  // Publishes the next work tile and its TileInfo to the QK warpgroup, which has no registers to walk the list itself.
  // Called by the whole warp of `leader`, the thread that writes.
  MLA_DEVICE void publish(const WorkTile& tile, int info, TileState& tiles, int leader) {
    if (warpgroup_thread() == leader) {
      mbarrier_wait(barriers_.tile_empty(tiles.stage), tiles.parity ^ 1);
      const uint32_t to = shared_ - Storage::KV + Storage::TILES + tiles.stage * sizeof(PublishedTile);
      st_shared_v4(to, tile.sequence, tile.length, tile.first_key, tile.end_key);
      st_shared_v2(to + TILE_PARTIAL_ROW, tile.partial_row, info);
      mbarrier_arrive(barriers_.tile_full(tiles.stage));
    }
    tiles.next();
    __syncwarp();
  }

  // The same for the tile that a scheduler fetched last, with ClusterReduceLast: one that the cluster merges is named,
  // with where its results go.
  template <class Scheduler>
  MLA_DEVICE void publish(const Scheduler& scheduler, const PlanPair& pair, int info, TileState& tiles, int leader) {
    WorkTile tile = scheduler.tile();
    if (pair.merges() && scheduler.ends_part()) {
      tile.partial_row = pair.partial_row();
      info |= MERGED_WITH_PEER;
    }
    publish(tile, info, tiles, leader);
  }

  // Queries may come in two tensors, but for threads that gather, which have no registers for that.
  static constexpr bool MAY_BE_IN_PARTS =
      Traits::HEAD_DIM_QK > Traits::Problem::HEAD_DIM_V && Traits::LOAD != KvLoad::gather;

  // Where the block's queries begin, which are the rows from head `head` of query token `token` on. Those of one tensor
  // are a matrix of rows, and a half of them is one box. Those in two come in boxes of 32 values.
  struct QueryStart {
    bool in_parts;
    int head, token;
    MLA_DEVICE QueryStart(const Params& params, int token_, int head_)
        : in_parts(MAY_BE_IN_PARTS && params.in_parts),
          head(in_parts ? head_ : token_ * params.heads + head_),
          token(in_parts ? token_ : 0) {}
  };

  // Issues the TMA loads of one half of every row of the block's queries, whose bytes count on `full`; by one thread. One
  // loop for both kinds of queries, so that few instructions lie between a stage that is empty and the first load.
  MLA_DEVICE void load_q_half(const QueryStart& start, int half, uint32_t to, uint32_t full) const {
    constexpr int LATENT_BLOCKS = Traits::Problem::HEAD_DIM_V / 32;
    int block = half * Traits::Q_BOXES;
#pragma unroll 1
    for (int left = start.in_parts ? Traits::Q_BOXES : 1; left != 0; --left, ++block, to += Traits::q_box_bytes(params_)) {
      const bool rope = start.in_parts && block >= LATENT_BLOCKS;
      load_q_box(to, rope ? params_.q_rope_map : params_.q_map, start.head, start.token,
                 rope ? block - LATENT_BLOCKS : block, full);
    }
  }
  // A box of queries. Both CTAs of two splits have the same, and each loads half for both; but where keys are selected, a
  // CTA without keys has ended before it would.
  static constexpr bool SHARES_Q = Cluster::MERGES_SPLITS && !Traits::SELECTED;
  MLA_DEVICE static void load_q_box(uint32_t to, const void* map, int head, int token, int block, uint32_t full) {
    if constexpr (SHARES_Q)
      tma_load_multicast(to, map, 0, head, token, block, full);
    else
      tma_load(to, map, 0, head, token, block, full);
  }

  // Loads one half of every row into a stage.
  MLA_DEVICE void load_q_half(const QueryStart& start, int half, const KvState& kv) const {
    const uint32_t full = barriers_.kv_full(kv.stage);
    mbarrier_expect_tx(full, Traits::Q_BOXES * Traits::q_box_bytes(params_));
    if (SHARES_Q && half != static_cast<int>(cluster_rank())) return;
    load_q_half(start, half, shared_ + kv.stage * Traits::STAGE_BYTES, full);
  }

  // A tile's queries take the two stages before its keys, so that they, too, arrive before they are needed: first one
  // half of every row, then the other. Rows past the sequence's last belong to the next sequence, or are zeros past the
  // very last; their results are never stored. Thread `leader` issues the loads.
  MLA_DEVICE void load_q(int sequence, KvState& kv, int leader) {
    const Heads heads(params_);
    const int in_sequence = heads.token(first_row()), head = heads.head(first_row(), in_sequence);
    const QueryStart start(params_, static_cast<int>(Queries(params_, sequence).first_token) + in_sequence, head);
    const int lane = warpgroup_thread() - leader;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      wait_for_tma_stage(kv_stage(kv));
      if (lane == 0)
        load_q_half(start, half, kv);
      else if (Traits::LOAD != KvLoad::tma)
        mbarrier_arrive(barriers_.kv_full(kv.stage));
      if constexpr (Traits::ROTATES)
        if (lane == 0 || Traits::LOAD != KvLoad::tma) mbarrier_arrive(barriers_.rope_full(kv.stage));
      kv.next();
    }
    __syncwarp();
  }

  // Where queries have a place of their own: both halves of every row, [boxes][rows][64 B] each. Called by a warp, whose
  // `parity` says which use of that place is next.
  MLA_DEVICE void load_q_apart(int token, int lane, uint32_t& parity) const {
    if (lane == 0) {
      mbarrier_wait(barriers_.q_empty(), parity ^ 1);
      fence_proxy_async();
      const int half_bytes = Traits::Q_BOXES * Traits::q_box_bytes(params_);
      mbarrier_expect_tx(barriers_.q_full(), 2 * half_bytes);
      const QueryStart start(params_, token, 0);
#pragma unroll 1
      for (int half = 0; half < 2; ++half)
        load_q_half(start, half, shared_ - Storage::KV + Storage::Q + half * half_bytes, barriers_.q_full());
    }
    parity ^= 1;
    __syncwarp();
  }

  // Starts to copy the rows of rope_cos_sin at the positions of an empty stage's keys, from `first` on, by one thread,
  // which has yet to arrive on rope_full. The table may end where the tile does, so no row behind the tile is read.
  MLA_DEVICE void load_cos_sin(int first, int end, const KvState& kv) const {
    const uint32_t full = barriers_.rope_full(kv.stage);
    const int bytes = min(end - first, BLOCK_N) * Traits::COS_SIN_BYTES;
    const char* from = reinterpret_cast<const char*>(params_.rope_cos_sin);
    mbarrier_expect_more(full, bytes);
    bulk_load(shared_ + kv.stage * Traits::STAGE_BYTES + Traits::COS_SIN_AT,
              from + static_cast<int64_t>(first) * Traits::COS_SIN_BYTES, bytes, full, EVICT_NORMAL);
  }

  const Params& params_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
};

}  // namespace mla::sm_90
