// The producer of rows that are multiplied as they are stored: selected rows are looked up and copied by cp.async
// straight into a stage of the KV ring.
//
// Each of the four warps brings 8 of a stage's 32 keys. No warp waits for a copy: a stage's mbarrier counts every lane
// once its copies have landed. So a warp runs ahead of the products by the whole ring, across query tokens, and the
// next token's list is looked up while the stages of this one are still being copied.
#pragma once

#include "sm_90/decode/producer.hpp"
#include "sm_90/ptx/cp_async.hpp"
#include "sm_90/sparse_decode/tile_scheduler.hpp"
#include "sm_90/sparse_decode/topk_lists.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerGather : ProducerBase<Traits> {
  using KvFormat = typename Traits::KvFormat;
  using Params = typename Traits::Params;
  using Base = ProducerBase<Traits>;
  static constexpr uint32_t WARP_KEYS = Traits::WARP_KEYS;
  static constexpr uint32_t BATCH_STAGES = 32 / WARP_KEYS;  // whose tokens are looked up together, one by a lane
  static_assert(WARP_KEYS == 8, "eight lanes copy 128 bytes of a key, and each lane has two keys of a stage");

 public:
  MLA_DEVICE ProducerGather(const Params& params, uint32_t shared)
      : Base(params, shared),
        warp_(warp_uniform(warpgroup_thread() / 32)),
        rows_(scratch() + Traits::SCRATCH_ROWS + slot() * 8),
        to_(this->shared_ + (warp_ * WARP_KEYS + slot()) * 128 + (piece() ^ slot()) * 16) {}

  MLA_DEVICE void run() {
    Scheduler scheduler(this->params_, scratch() + TopkLists::BYTES);
    Tile tile = open_tile(scheduler);
    while (tile.more) tile = bring(tile, scheduler);
  }

 private:
  // A published work tile. Without stages it has no keys, and nothing is brought for it.
  struct Tile {
    bool more;  // false at the end of the list
    int token;
    uint32_t stages;
  };

  MLA_DEVICE static uint32_t lane() { return warpgroup_thread() % 32; }
  // A lane copies two of its warp's eight keys of a stage, numbered slot and slot + 4, and of each the same piece of 16
  // bytes in every 128.
  MLA_DEVICE static uint32_t slot() { return lane() / 8; }
  MLA_DEVICE static uint32_t piece() { return lane() % 8; }
  MLA_DEVICE uint32_t scratch() const {
    return this->shared_ - Base::Storage::KV + Traits::SCRATCH + warp_ * Traits::SCRATCH_BYTES;
  }
  MLA_DEVICE TopkLists lists() const { return TopkLists(scratch()); }

  // Publishes the list's next tile and starts to load its first indices. One tile may be published while stages of the
  // tile before are not filled yet: QK frees its place when it takes an earlier tile. A second one might wait for those
  // stages.
  MLA_DEVICE Tile open_tile(Scheduler& scheduler) {
    const bool more = scheduler.more();
    int token = 0;
    WorkTile tile{};
    if (more) {
      token = scheduler.token();
      const int keys = lists().open(this->params_, token);
      tile = scheduler.take(token, keys);
      lists().set_tile(tile.first_key, tile.end_key);
      load_index(0);
    }
    const int number = scheduler.taken() - (more ? 1 : 0);
    typename Base::TileState tiles{number % Traits::TILE_STAGES,
                                   static_cast<uint32_t>(number / Traits::TILE_STAGES) % 2};
    this->publish(tile, more ? 0 : END_OF_WORK, tiles, 0);
    return Tile{more, token, static_cast<uint32_t>(tile.keys() + BLOCK_N - 1) / BLOCK_N};
  }

  // Brings the queries and the keys of a tile. Returns the next tile, which is opened as soon as the last indices of
  // this one are looked up.
  MLA_DEVICE Tile bring(const Tile& tile, Scheduler& scheduler) {
    if (tile.stages == 0) return open_tile(scheduler);
    Tile next{};
    load_q(tile.token);
#pragma unroll 1
    for (uint32_t stage = 0; stage < tile.stages; ++stage) {
      const bool first_of_batch = stage % BATCH_STAGES == 0;
      const bool last_batch = stage + BATCH_STAGES >= tile.stages;
      if (first_of_batch) {
        look_up(stage / BATCH_STAGES);
        if (!last_batch) load_index(stage / BATCH_STAGES + 1);
      }
      copy_stage(stage % BATCH_STAGES);
      if (first_of_batch && last_batch) next = open_tile(scheduler);
    }
    return next;
  }

  // The queries, in two stages as the other roles expect them. One lane loads them; all arrive as often as for keys.
  MLA_DEVICE void load_q(int token) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t full = this->barriers_.kv_full(kv_.stage);
      this->wait_for_tma_stage(this->kv_stage(kv_));
      mbarrier_arrive(full);
      if (lane() == 0) {
        if (warp_ != 0)
          mbarrier_arrive(full);
        else
          this->load_q_half({this->params_, token, first_row()}, half, kv_);
      }
      kv_.next();
    }
    __syncwarp();
  }

  // This lane's key of a batch, by its number within the tile.
  MLA_DEVICE int key_of(uint32_t batch) const {
    return (batch * BATCH_STAGES + lane() / WARP_KEYS) * BLOCK_N + warp_ * WARP_KEYS + lane() % WARP_KEYS;
  }

  // Starts to load the index of this lane's key of a batch. It is needed a batch later.
  MLA_DEVICE void load_index(uint32_t batch) {
    const int32_t* at = lists().index_at(key_of(batch));
    index_ = -1;
    if (at != nullptr) index_ = ld_global(at);
  }

  // Writes the addresses of a batch's rows, for all lanes to read. An absent row's address is not one; nothing is read
  // from there.
  MLA_DEVICE void look_up(uint32_t batch) {
    const SelectedToken token = lists().token_of(this->params_, key_of(batch), index_);
    present_ = __ballot_sync(~0u, token.present);
    const uint64_t row =
        reinterpret_cast<uint64_t>(token.page) + token.in_page * static_cast<uint64_t>(KvFormat::TOKEN_BYTES);
    st_shared(scratch() + Traits::SCRATCH_ROWS + lane() * 8, row);
    __syncwarp();
  }

  // Starts to copy this warp's keys of a stage: four keys of 128 bytes at a time, a line of memory each.
  MLA_DEVICE void copy_stage(uint32_t in_batch) {
    const uint32_t rows = rows_ + in_batch * WARP_KEYS * 8;
    const uint32_t present = present_ >> in_batch * WARP_KEYS & 0xFF;
    const uint32_t full = this->barriers_.kv_full(kv_.stage);
    const uint32_t to = to_ + kv_.stage * Traits::STAGE_BYTES;
    const uint64_t first = ld_shared<uint64_t>(rows), second = ld_shared<uint64_t>(rows + 4 * 8);
    this->wait_for_empty(kv_);
    copy_key(to, first + piece() * 16, present >> slot() & 1);
    copy_key((to ^ 4 << 4) + 4 * 128, second + piece() * 16, present >> (slot() + 4) & 1);
    cp_async_mbarrier_arrive(full);
    if (lane() == 0) {
      const uint32_t word =
          this->shared_ - Base::Storage::KV + Traits::PRESENT + kv_.stage * Traits::PRESENT_BYTES + warp_ * 4;
      st_shared(word, present << warp_ * WARP_KEYS);
      mbarrier_arrive(full);
    }
    __syncwarp();
    kv_.next();
  }

  // Starts to copy this lane's 16 bytes of every 128 of a key; zeros where it is absent, or behind a row that ends within
  // the last 128.
  template <int BLOCK = 0>
  MLA_DEVICE static void copy_key(uint32_t to, uint64_t from, bool present) {
    const bool in_row = (BLOCK + 1) * 64 <= Traits::HEAD_DIM_QK || piece() < Traits::HEAD_DIM_QK % 64 / 8;
    cp_async_16_zfill_at<BLOCK * Traits::BLOCK_BYTES, BLOCK * 128>(to, from, present && in_row);
    if constexpr (BLOCK + 1 < Traits::COLUMN_BLOCKS) copy_key<BLOCK + 1>(to, from, present);
  }

  const uint32_t warp_;
  const uint32_t rows_;  // where the address of this lane's first key of a batch lies
  const uint32_t to_;    // where its 16 bytes of a stage's first key go, in the first stage
  int index_;            // of this lane's key of the next batch
  uint32_t present_;     // a bit for each key of the batch
  PipelineState<Traits::STAGES> kv_;
};

}  // namespace mla::sm_90
