// The producer for pages of any size: all 128 threads copy keys in pieces of 16 bytes by cp.async. Its first warp also
// loads queries and publishes work tiles, its last one prefetches first. Of un-rotated keys two warps copy, and two
// rotate.
#pragma once

#include "sm_90/decode/producer.hpp"
#include "sm_90/decode/rotate_rope.hpp"
#include "sm_90/ptx/cp_async.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerCpAsync : ProducerBase<Traits> {
  using Base = ProducerBase<Traits>;
  using typename Base::KvState, typename Base::Params, typename Base::Storage, typename Base::TileState;
  using Base::params_, Base::barriers_, Base::shared_;
  enum Warp : int { PREFETCH_WARP = 3 };
  static constexpr int KEYS_APART = Traits::COPIERS / 8;  // a thread's keys; eight threads copy 128 bytes of a key

 public:
  MLA_DEVICE ProducerCpAsync(const Params& params, uint32_t shared) : Base(params, shared) {}

  MLA_DEVICE void run() {
    const int warp = warp_uniform(warpgroup_thread() / 32);
    if (warp == PREFETCH_WARP) this->prefetch();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    if constexpr (Traits::ROTATES)
      if (warp * 32 >= Traits::COPIERS)
        return RopeRotator<Traits>(shared_ - Storage::KV).all_tiles(scheduler, false);
    copy_keys(scheduler);
  }

 private:
  MLA_DEVICE void copy_keys(Scheduler& scheduler) {
    KvState kv;
    TileState tiles;
    scheduler.prefetch_pages();
    scheduler.resolve_bounds();
    scheduler.prefetch_window_pages();
    while (scheduler.more()) {
      const WorkTile tile = scheduler.tile();
      this->publish(tile, 0, tiles, 0);
      if (tile.keys() != 0) this->load_q(tile.sequence, kv, 0);
      const int32_t* pages = this->pages_of(scheduler);
      for (int first = tile.first_key; first < tile.end_key; first += BLOCK_N) {
        copy_stage(pages, first, tile.end_key, kv);
        kv.next();
        if (first == tile.first_key) scheduler.next();
      }
      if (tile.keys() == 0) scheduler.next();
    }
    this->publish(scheduler.tile(), END_OF_WORK, tiles, 0);
  }

  // A warp copies 128 contiguous bytes of each of four keys, so that memory is read in whole lines; the swizzle spreads
  // its writes over all banks.
  MLA_DEVICE void copy_stage(const int32_t* pages, int first, int end, const KvState& kv) {
    const int piece = warpgroup_thread() % 8;
    const int slot = warpgroup_thread() / 8;  // this thread's first key
    const char* cache = static_cast<const char*>(params_.kv_cache);
    const char* from[BLOCK_N / KEYS_APART];
#pragma unroll
    for (int i = 0; i < BLOCK_N / KEYS_APART; ++i) {
      const int key = first + slot + KEYS_APART * i;
      from[i] = nullptr;
      if (key < end) {
        const int in_table = this->page_of(key);
        const int64_t page = __ldg(pages + in_table);
        from[i] = cache + piece * 16 +
                  2 * (page * params_.kv_page_stride + this->in_page(key, in_table) * Traits::HEAD_DIM_QK);
      }
    }
    const uint32_t to = shared_ + kv.stage * Traits::STAGE_BYTES + slot * 128 + ((piece ^ (slot & 7)) << 4);
    this->wait_for_empty(kv);
    if constexpr (Traits::ROTATES) {
      if (warpgroup_thread() == 0) this->load_cos_sin(first, end, kv);
      copy_blocks<Traits::COLUMN_BLOCKS - 1, Traits::COLUMN_BLOCKS>(from, to);
      cp_async_mbarrier_arrive(barriers_.rope_full(kv.stage));
      copy_blocks<0, Traits::COLUMN_BLOCKS - 1>(from, to);
    } else {
      copy_blocks<0, Traits::COLUMN_BLOCKS>(from, to);
    }
    cp_async_mbarrier_arrive(barriers_.kv_full(kv.stage));
  }

  // Whether this thread's piece of a column block is in the row.
  MLA_DEVICE static bool in_row(int block) {
    return (block + 1) * 64 <= Traits::HEAD_DIM_QK || warpgroup_thread() % 8 < Traits::HEAD_DIM_QK % 64 / 8;
  }

  // This thread's pieces of some column blocks.
  template <int BEGIN, int END>
  MLA_DEVICE void copy_blocks(const char* const (&from)[BLOCK_N / KEYS_APART], uint32_t to) const {
#pragma unroll
    for (int i = 0; i < BLOCK_N / KEYS_APART; ++i) {
      const bool valid = from[i] != nullptr;
      const char* row = valid ? from[i] : static_cast<const char*>(params_.kv_cache);  // nothing is read when not valid
#pragma unroll
      for (int c = BEGIN; c < END; ++c)
        cp_async_16_l2_256(to + c * Traits::BLOCK_BYTES + i * KEYS_APART * 128, row + c * 128, valid && in_row(c));
    }
  }
};

}  // namespace mla::sm_90
