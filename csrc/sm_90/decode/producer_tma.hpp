// The producer for pages that are multiples of 32 keys. Its four warps issue TMA loads of keys and of queries, publish
// work tiles, and prefetch, so that none waits for another. Keys are loaded ahead of their use by up to the ring's
// stages. Un-rotated keys are rotated by the warps that publish and prefetch, which have little else to do.
#pragma once

#include "sm_90/decode/plan_pair.hpp"
#include "sm_90/decode/producer.hpp"
#include "sm_90/decode/rotate_rope.hpp"
#include "sm_90/decode/sentinel_fill.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerTma : ProducerBase<Traits> {
  using Base = ProducerBase<Traits>;
  using typename Base::Cluster, typename Base::KvState, typename Base::Params, typename Base::Stage,
      typename Base::Storage, typename Base::TileState;
  using Base::params_, Base::barriers_, Base::shared_;
  using Rotator = RopeRotator<Traits>;
  enum Warp : int { KV_WARP = 0, Q_WARP = 1, TILE_WARP = 2, PREFETCH_WARP = 3 };

 public:
  MLA_DEVICE ProducerTma(const Params& params, uint32_t shared) : Base(params, shared) {}

  MLA_DEVICE void run() {
    const int warp = warp_uniform(warpgroup_thread() / 32);
    if (warp == PREFETCH_WARP) {
      prefetch();
      if constexpr (!Traits::ROTATES) return;
    }
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    if (warp == Q_WARP)
      Cluster::EXCHANGES_P ? load_queries_and_peer_keys(scheduler) : load_queries(scheduler);
    else if (warp == TILE_WARP)
      publish_tiles(scheduler);
    else if (Traits::ROTATES && warp == PREFETCH_WARP)
      Rotator(shared_ - Storage::KV).all_tiles(scheduler, true);
    else
      load_keys(scheduler);
    if constexpr (Cluster::EXCHANGES_P)
      if (warp == TILE_WARP) Cluster::template send_p<Traits>(shared_ - Storage::KV);
  }

 private:
  MLA_DEVICE void prefetch() const {
    Base::prefetch();
    if constexpr (Traits::STREAMABLE)
      if (Traits::combine_streams(params_)) SentinelFill<Traits>(params_, shared_ - Storage::KV).run();
  }

  MLA_DEVICE void load_keys(Scheduler& scheduler) {
    KvState kv;
    scheduler.prefetch_pages();
    const int32_t* pages = this->pages_of(scheduler);
    scheduler.resolve_bounds();
    if (!scheduler.more()) start_fill();
    for (bool begun = false; scheduler.more(); begun = true) {
      if (begun) meet();
      const WorkTile tile = scheduler.tile();
      if (!begun || tile.keys() != 0) {  // two stages of queries
        kv.next();
        kv.next();
      }
      for (int first = tile.first_key; first < tile.end_key; first += BLOCK_N) {
        if constexpr (Traits::ROTATES)
          load_unrotated(pages, first, tile.end_key, kv);
        else
          load_boxes<Traits::KEY_BYTES>(pages, first, 0, this->kv_stage(kv));
        kv.next();
        if (first == tile.first_key) after_first_keys(scheduler);
      }
      if (tile.keys() == 0) after_first_keys(scheduler);
      pages = this->pages_of(scheduler);
    }
  }

  // Called once the loads of a tile's first keys are issued.
  MLA_DEVICE void after_first_keys(Scheduler& scheduler) const {
    start_fill();
    scheduler.next();
  }

  // With a streaming combine a block has one tile; the fill may begin behind the tile's first keys.
  MLA_DEVICE void start_fill() const {
    if constexpr (Traits::STREAMABLE)
      if (Traits::combine_streams(params_)) named_barrier_arrive<SENTINEL_FILL_BARRIER, 64>();
  }

  // The first tile's queries are loaded before the sequence's length is known, and so even for an empty tile.
  MLA_DEVICE void load_queries(Scheduler& scheduler) {
    if (!scheduler.more()) return;
    KvState kv;
    this->load_q(scheduler.tile().sequence, kv, Q_WARP * 32);
    scheduler.resolve_bounds();
    for (;;) {
      for (int first = scheduler.tile().first_key; first < scheduler.tile().end_key; first += BLOCK_N) kv.next();
      scheduler.next();
      if (!scheduler.more()) return;
      meet();
      if (scheduler.tile().keys() != 0)
        this->load_q(scheduler.tile().sequence, kv, Q_WARP * 32);
    }
  }

  // ClusterExchangeP: the CTA has one tile, or none. Of the keys of the peer's split it needs its half of the columns.
  MLA_DEVICE void load_queries_and_peer_keys(Scheduler& scheduler) {
    if (!scheduler.more()) return;
    KvState kv;
    const int sequence = scheduler.tile().sequence;
    this->load_q(sequence, kv, Q_WARP * 32);
    const int32_t* pages = this->pages_of(scheduler);
    scheduler.resolve_bounds();
    const int number = (static_cast<int>(blockIdx.y) - sequence * params_.num_splits) ^ 1;
    const EvenSplit split(params_, number, scheduler.tile().length, BLOCK_N);
    PipelineState<Traits::PEER_STAGES> peer;
    for (int first = split.first; first < split.end; first += BLOCK_N) {
      const int block = static_cast<int>(cluster_rank()) * (WARPGROUP_COLUMNS / 64);
      if constexpr (Cluster::EXCHANGES_P) {
        const Stage to{shared_ + Storage::PEER_KV + peer.stage * Traits::PEER_STAGE_BYTES,
                       Cluster::peer_kv_full(barriers_, peer.stage), Cluster::peer_kv_empty(barriers_, peer.stage),
                       peer.parity};
        load_boxes<Traits::PEER_STAGE_BYTES>(pages, first, block, to);
      }
      peer.next();
    }
  }

  // The warps that load keys and queries meet at every tile but the first, to stay within one revolution of the ring:
  // an mbarrier's parity distinguishes two phases, not three.
  MLA_DEVICE void meet() { named_barrier_sync<PRODUCER_BARRIER, 64>(); }

  MLA_DEVICE void publish_tiles(Scheduler& scheduler) {
    if constexpr (Cluster::MERGES_LAST) return publish_tiles_of_pair(scheduler);
    TileState tiles;
    Rotator rotator(shared_ - Storage::KV);
    scheduler.resolve_bounds();
    for (int info = Q_LOADED; scheduler.more(); info = 0) {
      this->publish(scheduler.tile(), info, tiles, TILE_WARP * 32);
      rotator.tile(scheduler.tile(), info == Q_LOADED);
      scheduler.next();
    }
    this->publish(scheduler.tile(), END_OF_WORK, tiles, TILE_WARP * 32);
  }

  // ClusterReduceLast: the tile that the cluster merges is named, with where its results go.
  MLA_DEVICE void publish_tiles_of_pair(Scheduler& scheduler) {
    TileState tiles;
    Rotator rotator(shared_ - Storage::KV);
    const PlanPair pair(params_, blockIdx.y);
    scheduler.resolve_bounds();
    for (int info = Q_LOADED; scheduler.more(); info = 0) {
      WorkTile tile = scheduler.tile();
      if (pair.merges() && scheduler.ends_part()) {
        tile.partial_row = pair.partial_row();
        info |= MERGED_WITH_PEER;
      }
      this->publish(tile, info, tiles, TILE_WARP * 32);
      rotator.tile(tile, (info & Q_LOADED) != 0);
      scheduler.next();
    }
    this->publish(scheduler.tile(), END_OF_WORK, tiles, TILE_WARP * 32);
    pair.tell_combine(params_, blockIdx.y);
  }

  // Loads a stage of un-rotated keys: first what is rotated while the rest is on its way.
  MLA_DEVICE void load_unrotated(const int32_t* pages, int first, int end, const KvState& kv) {
    constexpr int ROPE_BLOCK = Traits::COLUMN_BLOCKS - 1;
    const Stage stage = this->kv_stage(kv);
    this->wait_for_tma_stage(stage);
    if (warpgroup_thread() % 32 == 0) this->load_cos_sin(first, end, kv);
    const Stage rope{stage.at + Traits::ROPE_AT, barriers_.rope_full(kv.stage), stage.empty, stage.parity};
    load_boxes<Traits::BLOCK_BYTES>(pages, first, ROPE_BLOCK, rope);
    load_boxes<Traits::ROPE_AT>(pages, first, 0, stage);
  }

  // Loads BYTES of a stage, whose keys are rows of one page: [column blocks from `block` on][BLOCK_N][64]. Splits begin
  // at multiples of BLOCK_N. Keys past the tile's end come along; the QK warpgroup makes them harmless. Where partials
  // are written, L2 should keep those: they are read next, the keys not before the next step.
  template <int BYTES>
  MLA_DEVICE void load_boxes(const int32_t* pages, int first, int block, const Stage& to) {
    const uint64_t hint = params_.partial_out != nullptr ? EVICT_FIRST : EVICT_NORMAL;
    const int in_table = this->page_of(first);
    const int row = first - in_table * params_.page;
    const int page = __ldg(pages + in_table);
    this->wait_for_tma_stage(to);
    if (warpgroup_thread() % 32 != 0) return;
    mbarrier_expect_tx(to.full, BYTES);
#pragma unroll 1
    for (int at = 0; at < BYTES; at += Traits::BOX_BLOCKS * Traits::BLOCK_BYTES, block += Traits::BOX_BLOCKS)
      tma_load(to.at + at, params_.kv_map, 0, row, block, page, to.full, hint);
  }
};

}  // namespace mla::sm_90
