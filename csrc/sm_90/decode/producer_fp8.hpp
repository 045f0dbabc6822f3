// The producer for e4m3 rows in pages of any size. Each of its four warps brings 8 of a stage's 32 keys: bulk copies put
// the rows as they are stored into raw stages of the warp's own, two stages ahead, and its lanes convert them into the
// KV stage, in the swizzle that wgmma reads. The warps synchronise only through the mbarriers of the KV ring.
//
// e4m3 is exact in bf16 and in fp16, so the scale of the cache belongs to the scores and to the results (mainloop_qk).
// The first warp also loads queries, unless they are e4m3 too and all warps convert them, and publishes work tiles; the
// last one prefetches first.
#pragma once

#include "sm_90/decode/convert_fp8.hpp"
#include "sm_90/decode/producer.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerFp8 : ProducerBase<Traits> {
  using Base = ProducerBase<Traits>;
  using typename Base::KvState, typename Base::Params, typename Base::Storage, typename Base::TileState;
  using Base::params_, Base::barriers_, Base::shared_;
  using Element = typename Traits::Element;
  using RawState = PipelineState<Traits::RAW_STAGES>;
  enum Warp : int { PREFETCH_WARP = 3 };
  static constexpr int ROW_BYTES = Traits::HEAD_DIM_QK;

 public:
  MLA_DEVICE ProducerFp8(const Params& params, uint32_t shared)
      : Base(params, shared),
        warp_(warp_uniform(warpgroup_thread() / 32)),
        raw_(shared + Storage::RAW + warp_ * (Traits::RAW_STAGES * Traits::RAW_STAGE_BYTES)) {}

  MLA_DEVICE void run() {
    if (warp_ == PREFETCH_WARP) this->prefetch();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    bring_tiles(scheduler);
  }

 private:
  // The keys of a work tile, as the copies see them.
  struct Keys {
    const int32_t* pages;
    int first;  // of the next stage to be copied
    int end;
    MLA_DEVICE bool more() const { return first < end; }
  };

  // A lane's share of the next stage to be copied: its page is loaded while the stage before is converted.
  struct Request {
    int count;       // keys that it copies
    int warp_count;  // keys that the warp copies
    const char* from;
  };

  // The first tile's queries are loaded even where it has no keys: a peer may wait for its half of them.
  MLA_DEVICE void bring_tiles(Scheduler& scheduler) {
    KvState kv;
    TileState tiles;
    int copied = 0;  // stages of the tile that were copied during the tile before
    scheduler.prefetch_pages();
    if (!Traits::CONVERTS_Q && scheduler.more()) this->load_q(scheduler.tile().sequence, kv, 0);
    scheduler.resolve_bounds();
    for (int info = Q_LOADED; scheduler.more(); info = 0) {
      const WorkTile tile = scheduler.tile();
      Keys keys = keys_of(scheduler);
      keys.first += copied * BLOCK_N;
      this->publish(tile, info, tiles, 0);
      for (; copied < Traits::RAW_STAGES && keys.more(); ++copied) copy(keys);
      if (Traits::CONVERTS_Q) {
        if (info == Q_LOADED || tile.keys() != 0) convert_q(tile.sequence, kv);
      } else if (info != Q_LOADED && tile.keys() != 0) {
        this->load_q(tile.sequence, kv, 0);
      }
      copied = 0;
      Keys following{nullptr, 0, 0};
      for (int first = tile.first; first < tile.end; first += BLOCK_N) {
        const bool own = keys.more();
        const bool next = !own && following.more();
        const Request request = request_of({own ? keys.pages : following.pages, own ? keys.first : following.first,
                                            own ? keys.end : following.end});
        convert(first, tile.end, kv);
        if (own || next) issue(request);
        keys.first += own ? BLOCK_N : 0;
        following.first += next ? BLOCK_N : 0;
        copied += next;
        if (first == tile.first) {
          scheduler.next();
          if (scheduler.more()) following = keys_of(scheduler);
        }
      }
      if (tile.keys() == 0) scheduler.next();
    }
    this->publish(scheduler.tile(), END_OF_WORK, tiles, 0);
  }

  MLA_DEVICE Keys keys_of(const Scheduler& scheduler) const {
    return {this->pages_of(scheduler), scheduler.tile().first, scheduler.tile().end};
  }

  // The lanes share the warp's keys of a stage in runs of one page. No entry of the page table behind the tile's last
  // key is read.
  MLA_DEVICE Request request_of(const Keys& keys) const {
    const int run = min(params_.page & -params_.page, Traits::RAW_KEYS);
    const int lane = warpgroup_thread() % 32;
    const int first = keys.first + warp_ * Traits::RAW_KEYS;
    Request request;
    request.warp_count = max(0, min(keys.end - first, Traits::RAW_KEYS));
    request.count = min(run, request.warp_count - lane * run);
    request.from = static_cast<const char*>(params_.kv_cache);
    if (request.count > 0) {
      const int key = first + lane * run;
      const int in_table = this->page_of(key);
      request.from += __ldg(keys.pages + in_table) * params_.kv_page_stride + (key - in_table * params_.page) * ROW_BYTES;
    }
    return request;
  }

  // Copies a stage's keys to the raw stage that this warp has converted longest ago. All lanes are done with it.
  MLA_DEVICE void issue(const Request& request) {
    const uint32_t full = barriers_.raw_full(warp_, to_.stage);
    const int lane = warpgroup_thread() % 32;
    if (lane == 0) mbarrier_expect_tx(full, request.warp_count * ROW_BYTES);
    __syncwarp();
    if (request.count > 0) {
      const uint64_t hint = params_.partial_out != nullptr ? EVICT_FIRST : EVICT_NORMAL;
      const int run = min(params_.page & -params_.page, Traits::RAW_KEYS);
      bulk_load(raw_ + to_.stage * Traits::RAW_STAGE_BYTES + lane * run * ROW_BYTES, request.from,
                request.count * ROW_BYTES, full, hint);
    }
    to_.next();
  }

  MLA_DEVICE void copy(Keys& keys) {
    issue(request_of(keys));
    keys.first += BLOCK_N;
  }

  // Converts this warp's keys of a stage. A lane has 16 values of each column block of one key, so that eight lanes
  // write all banks, two keys to even and odd positions by the swizzle. They read all banks, too, but of 512-byte rows,
  // which begin at the same bank, half of them twice. Keys past the tile's end become zeros: their scores are masked, but their values are multiplied.
  MLA_DEVICE void convert(int first, int end, KvState& kv) {
    const int lane = warpgroup_thread() % 32;
    const int key = lane / 4, part = lane % 4;
    const uint32_t from = raw_ + from_.stage * Traits::RAW_STAGE_BYTES + key * ROW_BYTES + part * 16;
    const uint32_t to = shared_ + kv.stage * Traits::STAGE_BYTES + (warp_ * Traits::RAW_KEYS + key) * 128 +
                        ((part * 2 ^ key) << 4);
    const bool present = first + warp_ * Traits::RAW_KEYS + key < end;
    mbarrier_wait(barriers_.raw_full(warp_, from_.stage), from_.parity);
    this->wait_for_empty(kv);
    if (present)
      convert_row<Element, Traits::COLUMN_BLOCKS, Traits::BLOCK_BYTES>(from, to);
    else
#pragma unroll
      for (int c = 0; c < Traits::COLUMN_BLOCKS; ++c) {
        st_shared_v4(to + c * Traits::BLOCK_BYTES, 0, 0, 0, 0);
        st_shared_v4((to ^ 16) + c * Traits::BLOCK_BYTES, 0, 0, 0, 0);
      }
    __syncwarp();
    mbarrier_arrive(barriers_.kv_full(kv.stage));
    from_.next();
    kv.next();
  }

  // Converts a tile's queries into the two stages before its keys, as TMA would bring them (ProducerBase::load_q): two
  // threads a row. Rows that the sequence does not have are zeros, but none that no box would have.
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
      if (row * 64 < box) convert_q_row<Element, Traits::Q_BOXES>(present ? from : nullptr, to, box);
      from += Traits::Q_BOXES * 32;
      mbarrier_arrive(barriers_.kv_full(kv.stage));
      kv.next();
    }
    __syncwarp();
  }

  const int warp_;
  const uint32_t raw_;  // this warp's raw stages
  RawState from_;       // the next to be converted
  RawState to_;         // the next to be copied to
};

}  // namespace mla::sm_90
