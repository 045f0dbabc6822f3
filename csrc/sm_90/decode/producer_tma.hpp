// The producer for pages that are multiples of 32 keys. Its four warps issue TMA loads of keys and of queries, publish
// work tiles, and prefetch, so that none waits for another. Keys are loaded ahead of their use by up to the ring's
// stages. With ClusterShareKv each of the two CTAs loads a part of every stage of keys for both.
#pragma once

#include "sm_90/decode/producer.hpp"
#include "sm_90/ptx/dsmem.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerTma : protected ProducerBase<Traits> {
 protected:
  using Base = ProducerBase<Traits>;
  using typename Base::Cluster, typename Base::KvState, typename Base::Params, typename Base::Stage,
      typename Base::Storage, typename Base::TileState;
  using Base::params_, Base::barriers_, Base::shared_;
  static constexpr int64_t MOST_IN_L2 = 96 << 20;  // bytes of keys of a call whose sequences are as long as the tile's
  enum Warp : int { KV_WARP = 0, Q_WARP = 1, TILE_WARP = 2, PREFETCH_WARP = 3 };

 public:
  MLA_DEVICE ProducerTma(const Params& params, uint32_t shared) : Base(params, shared), hint_(hint_beside_partials()) {}

  MLA_DEVICE void run() {
    const int warp = warp_uniform(warpgroup_thread() / 32);
    if (warp == PREFETCH_WARP) return Base::prefetch();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    if (warp == Q_WARP)
      load_queries(scheduler);
    else if (warp == TILE_WARP)
      publish_tiles(scheduler, [](const WorkTile&, bool) {});
    else
      load_keys(scheduler, [&](auto... stage) { load_stage(stage...); }, [] {});
  }

 protected:
  // Loads all tiles' keys: `load` brings those of a stage. `begun` is called once the loads of a tile's first keys are
  // issued, and where the block has no tile.
  template <class Load, class Begun>
  MLA_DEVICE void load_keys(Scheduler& scheduler, const Load& load, const Begun& begun) {
    KvState kv;
    scheduler.prefetch_pages();
    const int32_t* pages = this->pages_of(scheduler);
    scheduler.resolve_bounds();
    scheduler.prefetch_window_pages();
    if (!scheduler.more()) begun();
    for (bool any = false; scheduler.more(); any = true) {
      if (any) meet();
      const WorkTile tile = scheduler.tile();
      if (!any || tile.keys() != 0) {  // two stages of queries
        if (any) meet_behind_queries();
        kv.next();
        kv.next();
      }
      const int begin = tile.template first_stage<BLOCK_N>();
      for (int first = begin;;) {
        if (first < tile.end_key) {
          load(pages, first, tile.end_key, kv);
          kv.next();
        }
        if (first == begin) {
          hint_ = drifts_apart(tile) ? EVICT_NORMAL : hint_beside_partials();  // of the tile's other keys
          begun();
          scheduler.next();
        }
        first += BLOCK_N;
        if (first >= tile.end_key) break;
      }
      pages = this->pages_of(scheduler);
    }
    if constexpr (Cluster::SHARES_KV) this->wait_for_peer_readers(kv);
  }

  // Loads a stage of keys from `first` on.
  MLA_DEVICE void load_stage(const int32_t* pages, int first, int, const KvState& kv) {
    load_boxes<Traits::KEY_BYTES>(pages, first, 0, this->kv_stage(kv));
  }

  // The first tile's queries are loaded before the sequence's length is known, and so even for an empty tile.
  MLA_DEVICE void load_queries(Scheduler& scheduler) {
    if (!scheduler.more()) return;
    KvState kv;
    this->load_q(scheduler.tile().sequence, kv, Q_WARP * 32);
    scheduler.resolve_bounds();
    for (;;) {
      const WorkTile& tile = scheduler.tile();
      for (int first = tile.template first_stage<BLOCK_N>(); first < tile.end_key; first += BLOCK_N) kv.next();
      scheduler.next();
      if (!scheduler.more()) return;
      meet();
      if (scheduler.tile().keys() != 0) {
        this->load_q(scheduler.tile().sequence, kv, Q_WARP * 32);
        meet_behind_queries();
      }
    }
  }

  // The warps that load keys and queries meet at every tile but the first, to stay within one revolution of the ring:
  // an mbarrier's parity distinguishes two phases, not three.
  MLA_DEVICE void meet() {
    __syncwarp();  // one lane issues loads, and a barrier wants whole warps
    named_barrier_sync<PRODUCER_BARRIER, 64>();
  }
  // Where the peer reads this CTA's keys, its arrivals for later stages may overtake those that the queries' stages still
  // wait for: PTX orders none of them. Keys are loaded only once the queries are, so that the two warps wait for the
  // same revolution (D77 in csrc/sm_90/decode/PERF.md).
  MLA_DEVICE void meet_behind_queries() {
    if constexpr (Cluster::SHARES_KV) meet();
  }

  // Publishes all tiles, then calls `after` with each and whether its queries are loaded even if it has no keys. With
  // ClusterReduceLast the tile that the cluster merges is named, with where its results go.
  template <class After>
  MLA_DEVICE void publish_tiles(Scheduler& scheduler, const After& after) {
    if constexpr (Cluster::MERGES_LAST) return publish_tiles_of_pair(scheduler, after);
    TileState tiles;
    scheduler.resolve_bounds();
    for (int info = Q_LOADED; scheduler.more(); info = 0) {
      this->publish(scheduler.tile(), info, tiles, TILE_WARP * 32);
      if constexpr (Traits::FOLDS) scheduler.tell_combine();
      after(scheduler.tile(), info == Q_LOADED);
      scheduler.next();
    }
    this->publish(scheduler.tile(), END_OF_WORK, tiles, TILE_WARP * 32);
  }
  template <class After>
  MLA_DEVICE void publish_tiles_of_pair(Scheduler& scheduler, const After& after) {
    TileState tiles;
    const PlanPair pair(params_, blockIdx.y);
    scheduler.resolve_bounds();
    for (int info = Q_LOADED; scheduler.more(); info = 0) {
      this->publish(scheduler, pair, info, tiles, TILE_WARP * 32);
      after(scheduler.tile(), info == Q_LOADED);
      scheduler.next();
    }
    this->publish(scheduler.tile(), END_OF_WORK, tiles, TILE_WARP * 32);
    pair.tell_combine(params_, blockIdx.y);
  }

  // What L2 does with keys. Where partials are written, it should keep those: they are read next, the keys not before the
  // next step.
  MLA_DEVICE uint64_t hint_beside_partials() const {
    return params_.partial_out != nullptr ? EVICT_FIRST : EVICT_NORMAL;
  }

  // Whether CTAs that read the same keys, and are not of one cluster that shares them, do so at different times. In the
  // batch-invariant mode a large batch has more partials than L2 holds, and what these take to store differs from CTA to
  // CTA. Keys that are not the first to leave L2 are then read from memory once, not twice (D69 in
  // csrc/sm_90/combine/PERF.md).
  // A CTA that folds stores little to memory, and needs its sum in L2 more.
  MLA_DEVICE bool drifts_apart(const WorkTile& tile) const {
    if (Traits::FOLDS || params_.split_size == 0 || tile.partial_row < 0) return false;
    if (params_.rows <= LIST_ROWS<Traits>) return false;
    return static_cast<int64_t>(params_.batch) * tile.length * (Traits::KEY_BYTES / BLOCK_N) > MOST_IN_L2;
  }

  // Loads BYTES of a stage, whose keys are rows of one page: [column blocks from `block` on][BLOCK_N][64]. Splits begin
  // at multiples of BLOCK_N. Keys past the tile's end come along; the QK warpgroup makes them harmless.
  //
  // With ClusterShareKv a stage is two boxes, of nearly equal size, that go to both CTAs. Each CTA loads one, in turn the
  // first and the rest, and expects both on its own mbarrier, where they may come before. A stage is empty when both CTAs
  // have read it, and full only once both have found it empty: so none releases it again while the other still counts
  // arrivals of the release before, however long a warp of that one is stopped between two instructions, as it is when
  // another process gets the GPU (D79 in PERF.md).
  template <int BYTES>
  MLA_DEVICE void load_boxes(const int32_t* pages, int first, int block, const Stage& to) {
    constexpr int BOX_BYTES = Traits::BOX_BLOCKS * Traits::BLOCK_BYTES;
    const int in_table = this->page_of(first);
    const int row = first - in_table * params_.page;
    const int page = __ldg(pages + in_table);
    this->wait_for_tma_stage(to);
    if (warpgroup_thread() % 32 != 0) return;
    mbarrier_expect_tx(to.full, BYTES);
    if constexpr (Cluster::SHARES_KV) {
      static_assert(BYTES > BOX_BYTES && BYTES <= 2 * BOX_BYTES, "each CTA has a box");
      if ((stages_++ ^ cluster_rank()) % 2 == 0)
        tma_load_multicast(to.at, params_.kv_map, 0, row, block, page, to.full, hint_);
      else
        tma_load_multicast(to.at + BOX_BYTES, params_.kv_rest_map, 0, row, block + Traits::BOX_BLOCKS, page, to.full,
                           hint_);
    } else {
#pragma unroll 1
      for (int at = 0; at < BYTES; at += BOX_BYTES, block += Traits::BOX_BLOCKS)
        tma_load(to.at + at, params_.kv_map, kv_map_column<Traits>(block), row, kv_map_block<Traits>(block), page,
                 to.full, hint_);
    }
  }

  uint64_t hint_;         // for the keys that are loaded next
  uint32_t stages_ = 0;  // of keys so far, with ClusterShareKv: which CTA loads a stage's first box
};

}  // namespace mla::sm_90
