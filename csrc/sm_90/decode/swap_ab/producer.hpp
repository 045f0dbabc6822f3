// The producer of swap_ab: bulk copies bring rows of queries and of keys, as they are stored, to the stages of one
// ring. Its four warps take turns, a stage each, because issuing the copies of a stage takes longer than it may.
#pragma once

#include "sm_90/decode/producer.hpp"
#include "sm_90/decode/swap_ab/shared_storage.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class SwapAbProducer : ProducerBase<Traits> {
  using Base = ProducerBase<Traits>;
  using typename Base::KvState, typename Base::Params, typename Base::TileState;
  using Base::params_, Base::barriers_, Base::shared_;
  enum Warp : int { TILE_WARP = 0, PREFETCH_WARP = 3, WARPS = 4 };
  static constexpr int ROW_BYTES = Traits::HEAD_DIM_QK;
  static constexpr int GROUP = 16;  // keys that lie next to each other in a stage

 public:
  MLA_DEVICE SwapAbProducer(const Params& params, uint32_t shared)
      : Base(params, shared), warp_(warp_uniform(warpgroup_thread() / 32)) {}

  // The first tile's queries are loaded before the sequence's length is known, and so even for an empty tile.
  MLA_DEVICE void run() {
    if (warp_ == PREFETCH_WARP) this->prefetch();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    TileState tiles;
    scheduler.prefetch_pages();
    if (scheduler.more()) load_q(scheduler.tile().sequence);
    scheduler.resolve_bounds();
    scheduler.prefetch_window_pages();
    for (int info = Q_LOADED; scheduler.more(); info = 0) {
      const WorkTile tile = scheduler.tile();
      if (warp_ == TILE_WARP) this->publish(tile, info, tiles, TILE_WARP * 32);
      if (info != Q_LOADED && tile.keys() != 0) load_q(tile.sequence);
      const int32_t* pages = this->pages_of(scheduler);
      for (int first = tile.template first_stage<BLOCK_N>(); first < tile.end_key; first += BLOCK_N) {
        if (takes_turn()) copy_stage(pages, first, min(tile.end_key - first, BLOCK_N), tile.first_key - first);
        next_stage();
      }
      scheduler.next();
    }
    if (warp_ == TILE_WARP) this->publish(scheduler.tile(), END_OF_WORK, tiles, TILE_WARP * 32);
  }

 private:
  MLA_DEVICE bool takes_turn() const { return turn_ == warp_; }
  MLA_DEVICE void next_stage() {
    kv_.next();
    turn_ = (turn_ + 1) % WARPS;
  }

  // A lane copies a row, if the sequence has it.
  MLA_DEVICE void load_q(int sequence) {
    const Queries queries(params_, sequence);
    const int lane = warpgroup_thread() % 32;
#pragma unroll 1
    for (int stage = 0; stage < Traits::Q_STAGES; ++stage) {
      if (takes_turn()) {
        const int row = first_row() + stage * 16;
        const int present = min(max(queries.count * params_.heads - row, 0), 16);
        const auto to = this->kv_stage(kv_);
        this->wait_for_tma_stage(to);
        if (lane == 0) mbarrier_expect_tx(to.full, present * Traits::Q_ROW_BYTES);
        __syncwarp();
        if (lane < present) {
          const int64_t number = queries.first_token * params_.heads + row + lane;
          const char* from = static_cast<const char*>(params_.q) +
                             number * params_.q_row_stride * (Traits::Q_ROW_BYTES / Traits::HEAD_DIM_QK);
          bulk_load(to.at + lane * Traits::Q_ROW_BYTES, from, Traits::Q_ROW_BYTES, to.full, EVICT_NORMAL);
        }
      }
      next_stage();
    }
  }

  // Copies `count` keys from `first` on, but no run of the first `skipped`. The lanes share them in runs of one page and
  // one group. No entry of the page table behind the tile's last key is read, and none before the window's first.
  MLA_DEVICE void copy_stage(const int32_t* pages, int first, int count, int skipped) const {
    const int run = min(params_.page & -params_.page, GROUP);
    const int lane = warpgroup_thread() % 32;
    const int begin = lane * run;
    const int absent = max(skipped, 0) & -run;
    const int mine = begin < absent ? 0 : min(run, count - begin);
    const char* from = static_cast<const char*>(params_.kv_cache);
    if (mine > 0) {
      const int key = first + begin;
      const int in_table = this->page_of(key);
      from += __ldg(pages + in_table) * params_.kv_page_stride + this->in_page(key, in_table) * ROW_BYTES;
    }
    const auto to = this->kv_stage(kv_);
    this->wait_for_tma_stage(to);
    if (lane == 0) mbarrier_expect_tx(to.full, (count - absent) * ROW_BYTES);
    __syncwarp();
    if (mine > 0) {
      // No other block reads them.
      bulk_load(to.at + begin / GROUP * Traits::GROUP_BYTES + begin % GROUP * ROW_BYTES, from, mine * ROW_BYTES,
                to.full, EVICT_FIRST);
    }
  }

  const int warp_;
  int turn_ = 0;
  KvState kv_;
};

}  // namespace mla::sm_90
