// The producer for e4m3 rows in pages of any size. Bulk copies put the rows as they are stored into the stages of a raw
// ring; each of the four warps converts 8 of a stage's 32 keys into the KV stage, in the swizzle that wgmma reads. The
// warps take turns at issuing the copies of a stage, because that takes 600 clocks, a third of the time of a stage.
//
// e4m3 is exact in bf16 and in fp16, so the scale of the cache belongs to the scores and to the results (mainloop_qk).
// The first warp also loads queries, unless they are e4m3 too and all warps convert them, and publishes work tiles; the
// last one prefetches first.
#pragma once

#include "sm_90/decode/convert_fp8.hpp"
#include "sm_90/decode/producer.hpp"
#include "sm_90/decode/q_as_stored.hpp"

namespace mla::sm_90 {

// The ring of stages as they are stored, and the mbarriers that say when they are full and
// empty.
template <class Traits>
struct RawStorage {
  uint8_t rows[Traits::RAW_STAGES][Traits::RAW_STAGE_BYTES];
  uint64_t full[Traits::RAW_STAGES];
  uint64_t empty[Traits::RAW_STAGES];
};

template <class Traits, class Scheduler>
class ProducerFp8 : ProducerBase<Traits> {
  using Base = ProducerBase<Traits>;
  using typename Base::KvState, typename Base::Params, typename Base::Storage, typename Base::TileState;
  using Base::params_, Base::barriers_, Base::shared_;
  using Element = typename Traits::Element;
  using typename Base::Cluster;
  // Which tiles the cluster merges, with ClusterReduceLast.
  struct NoPair {
    MLA_DEVICE NoPair(const Params&, int) {}
  };
  using PairOf = typename SelectStorage<Cluster::MERGES_LAST, PlanPair, NoPair>::Type;
  enum Warp : int { PREFETCH_WARP = 3 };
  static constexpr int ROW_BYTES = Traits::HEAD_DIM_QK;
  static constexpr int AHEAD = Traits::RAW_STAGES - Traits::RAW_LAG;  // stages that are copied before they are converted

 public:
  MLA_DEVICE ProducerFp8(const Params& params, uint32_t shared)
      : Base(params, shared), warp_(warp_uniform(warpgroup_thread() / 32)) {
    const int key = warpgroup_thread() / 4, part = warpgroup_thread() % 4;
    if constexpr (Traits::SCORES_AS_STORED)
      from_ = shared + Storage::RAW + key * 64 + ((part ^ key / 2 % 4) << 4);
    else
      from_ = shared + Storage::RAW + key * ROW_BYTES + part * 16;
    to_ = shared_ + key * 128 + ((part * 2 ^ key % 8) << 4);
  }

  MLA_DEVICE void run() {
    if (warp_ == PREFETCH_WARP) this->prefetch();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    bring_tiles(scheduler);
  }

 private:
  // The keys of a work tile that are still to be copied, by the stage: those up to a multiple of BLOCK_N.
  struct Keys {
    const int32_t* pages;
    int first;
    int end;
    MLA_DEVICE bool more() const { return first < end; }
  };

  // The first tile's queries are loaded even where it has no keys: a peer may wait for its half of them. At the end of
  // a tile the stages that were copied and not converted are those of the next one.
  MLA_DEVICE void bring_tiles(Scheduler& scheduler) {
    KvState kv;
    TileState tiles;
    scheduler.prefetch_pages();
    if (!Traits::CONVERTS_Q && scheduler.more()) this->load_q(scheduler.tile().sequence, kv, 0);
    scheduler.resolve_bounds();
    scheduler.prefetch_window_pages();
    const PairOf pair(params_, blockIdx.y);
    Keys keys = keys_of(scheduler);
    for (int info = Q_LOADED; scheduler.more(); info = 0) {
      const int sequence = scheduler.tile().sequence;
      int count = scheduler.tile().end_key - scheduler.tile().template first_stage<BLOCK_N>();
      publish_next(scheduler, pair, info, tiles);
      while (copied_ - converted_ < AHEAD && keys.more()) copy(keys);
      if (Traits::CONVERTS_Q) {
        if (info == Q_LOADED || count != 0) convert_q(sequence, kv);
      } else if (info != Q_LOADED && count != 0) {
        this->load_q(sequence, kv, 0);
      }
      scheduler.next();
      bool own = true;  // `keys` are this tile's
      for (; count > 0; count -= BLOCK_N) {
        convert(count, kv);
        if (own && !keys.more()) {
          keys = keys_of(scheduler);
          own = false;
        }
        if (keys.more()) copy(keys);
      }
      if (own) keys = keys_of(scheduler);
    }
    this->publish(scheduler.tile(), END_OF_WORK, tiles, 0);
    if constexpr (Cluster::MERGES_LAST)
      if (warp_ == 0) PlanPair(params_, blockIdx.y).tell_combine(params_, blockIdx.y);  // anew: it takes registers
  }

  MLA_DEVICE void publish_next(const Scheduler& scheduler, const PairOf& pair, int info, TileState& tiles) {
    if constexpr (Cluster::MERGES_LAST)
      this->publish(scheduler, pair, info, tiles, 0);
    else
      this->publish(scheduler.tile(), info, tiles, 0);
  }

  // None at the end of the list.
  MLA_DEVICE Keys keys_of(const Scheduler& scheduler) const {
    return {this->pages_of(scheduler), scheduler.tile().first_key, scheduler.more() ? scheduler.tile().end_key : 0};
  }

  // Copies a stage's keys to the raw stage that was converted longest ago, if it is this warp's turn.
  MLA_DEVICE void copy(Keys& keys) {
    if (copied_ % Traits::PRODUCER_WARPS == static_cast<uint32_t>(warp_)) {
      if constexpr (Traits::SCORES_AS_STORED)
        copy_box(keys);
      else
        copy_stage(keys);
    }
    keys.first = end_of_stage(keys.first);
    ++copied_;
  }

  MLA_DEVICE static int end_of_stage(int key) { return (key | (BLOCK_N - 1)) + 1; }

  // The lanes share the keys in runs of one page. No entry of the page table behind the tile's last key is read, and
  // none before the window's first.
  MLA_DEVICE void copy_stage(const Keys& keys) const {
    const uint32_t stage = copied_ % Traits::RAW_STAGES;
    const uint32_t full = barriers_.raw_full(stage);
    const int run = min(params_.page & -params_.page, BLOCK_N);
    const int lane = warpgroup_thread() % 32;
    const int begin = keys.first & -run, end = min(keys.end, end_of_stage(keys.first));
    const int key = begin + lane * run, count = min(run, end - key);
    const char* from = static_cast<const char*>(params_.kv_cache);
    if (count > 0) {
      const int in_table = this->page_of(key);
      from += __ldg(keys.pages + in_table) * params_.kv_page_stride + this->in_page(key, in_table) * ROW_BYTES;
    }
    mbarrier_wait(barriers_.raw_empty(stage), copied_ / Traits::RAW_STAGES % 2 ^ 1);
    if (lane == 0) mbarrier_expect_tx(full, (end - begin) * ROW_BYTES);
    __syncwarp();
    if (count > 0) {
      const uint64_t hint = params_.partial_out != nullptr ? EVICT_FIRST : EVICT_NORMAL;
      bulk_load(shared_ - Storage::KV + Storage::RAW + stage * Traits::RAW_STAGE_BYTES + (key & (BLOCK_N - 1)) * ROW_BYTES, from,
                count * ROW_BYTES, full, hint);
    }
  }

  // The same by TMA, [blocks of 64 values][BLOCK_N][64 B] in the 64-byte swizzle: the keys are rows of one page, and
  // those past the tile's end come along.
  MLA_DEVICE void copy_box(const Keys& keys) const {
    const uint32_t stage = copied_ % Traits::RAW_STAGES;
    const uint32_t full = barriers_.raw_full(stage);
    const int in_table = this->page_of(keys.first);
    const int page = __ldg(keys.pages + in_table);
    mbarrier_wait(barriers_.raw_empty(stage), copied_ / Traits::RAW_STAGES % 2 ^ 1);
    if (warpgroup_thread() % 32 == 0) {
      const uint64_t hint = params_.partial_out != nullptr ? EVICT_FIRST : EVICT_NORMAL;
      mbarrier_expect_tx(full, Traits::RAW_STAGE_BYTES);
      tma_load(shared_ - Storage::KV + Storage::RAW + stage * Traits::RAW_STAGE_BYTES, params_.kv_map, 0,
               static_cast<int>(this->in_page(keys.first, in_table)), 0, page, full, hint);
    }
    __syncwarp();
  }

  // Converts this warp's keys of a stage, the first of the `count` that the tile still has. A lane has 16 values of
  // each column block of one key, so that eight lanes write all banks, two keys to even and odd positions by the
  // swizzle. They read all banks, too, but of 512-byte rows, which begin at the same bank, half of them twice. Keys
  // past the tile's end become zeros: their scores are masked, but their values are multiplied. The QK warpgroup clears
  // keys before the window. Of rows that end within a block, two lanes convert what follows the row, which nothing
  // reads.
  MLA_DEVICE void convert(int count, KvState& kv) {
    const uint32_t raw = converted_ % Traits::RAW_STAGES;
    const uint32_t to = to_ + kv.stage * Traits::STAGE_BYTES;
    mbarrier_wait(barriers_.raw_full(raw), converted_ / Traits::RAW_STAGES % 2);
    constexpr int FROM_BYTES = Traits::SCORES_AS_STORED ? Traits::RAW_BLOCK_BYTES : 64;
    convert_row<Element, Traits::COLUMN_BLOCKS, FROM_BYTES, Traits::BLOCK_BYTES>(
        from_ + raw * Traits::RAW_STAGE_BYTES, to, [&] { this->wait_for_empty(kv); });
    mbarrier_arrive(barriers_.raw_empty(raw));
    if (count < BLOCK_N) clear_absent(count, to);
    mbarrier_arrive(barriers_.kv_full(kv.stage));
    ++converted_;
    kv.next();
  }

  MLA_DEVICE static void clear_absent(int count, uint32_t to) {
    if (warpgroup_thread() / 4 < count) return;
#pragma unroll
    for (int c = 0; c < Traits::COLUMN_BLOCKS; ++c) {
      st_shared_v4(to + c * Traits::BLOCK_BYTES, 0, 0, 0, 0);
      st_shared_v4((to ^ 16) + c * Traits::BLOCK_BYTES, 0, 0, 0, 0);
    }
  }

  // Converts a tile's queries into the two stages before its keys, as TMA would bring them (ProducerBase::load_q), or
  // copies them there: two threads a row. Rows that the sequence does not have are zeros, but none that no box would have.
  MLA_DEVICE void convert_q(int sequence, KvState& kv) {
    const Queries queries(params_, sequence);
    const int row = warpgroup_thread() / 2, side = warpgroup_thread() % 2;
    const int64_t number = queries.first_token * params_.heads + first_row() + row;
    const char* from = static_cast<const char*>(params_.q) + number * params_.q_row_stride + side * 16;
    const bool present = first_row() + row < queries.count * params_.heads;
    const uint32_t box = Traits::q_box_bytes(params_);
    const uint32_t at = row * 64 + ((side * 2 ^ (row / 2 & 3)) << 4);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t to = shared_ + kv.stage * Traits::STAGE_BYTES + at;
      this->wait_for_empty(kv);
      if constexpr (Traits::SCORES_AS_STORED) {
        QOperandOf<Traits>::put(present ? from : nullptr, to - at, row, side);
      } else if (row * 64 < box) {
        const int boxes = Traits::LAST_Q_BOXES < Traits::Q_BOXES && half == 1 ? Traits::LAST_Q_BOXES : Traits::Q_BOXES;
        convert_q_row<Element, Traits::Q_BOXES>(present ? from : nullptr, to, box, boxes);
      }
      from += Traits::Q_BOXES * 32;
      mbarrier_arrive(barriers_.kv_full(kv.stage));
      kv.next();
    }
    __syncwarp();
  }

  const int warp_;
  uint32_t from_;           // what this lane converts, of the first raw stage
  uint32_t to_;             // where it puts it, of the first KV stage
  uint32_t copied_ = 0;     // stages; their numbers say which raw stage is next, and whose turn it is to copy
  uint32_t converted_ = 0;
};

}  // namespace mla::sm_90
