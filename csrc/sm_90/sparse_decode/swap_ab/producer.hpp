// The producer of sparse decode with keys as the first operand: it looks selected keys up and copies their records, as
// they are stored, to the stages of one ring. Of the four stages of a step each of its warps fills one.
#pragma once

#include "sm_90/decode/producer.hpp"
#include "sm_90/ptx/cp_async.hpp"
#include "sm_90/sparse_decode/swap_ab/shared_storage.hpp"
#include "sm_90/sparse_decode/tile_scheduler.hpp"
#include "sm_90/sparse_decode/topk_lists.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class SparseSwapAbProducer : ProducerBase<Traits> {
  using Base = ProducerBase<Traits>;
  using KvFormat = typename Traits::KvFormat;
  using Storage = SharedStorage<Traits>;
  using typename Base::KvState, typename Base::Params, typename Base::TileState;
  using Base::params_, Base::barriers_, Base::shared_;
  enum Warp : int { TILE_WARP = 0, Q_WARP = 3 };
  static constexpr int STAGE_KEYS = Traits::STAGE_KEYS;

 public:
  MLA_DEVICE SparseSwapAbProducer(const Params& params, uint32_t shared)
      : Base(params, shared),
        warp_(warp_uniform(warpgroup_thread() / 32)),
        lane_(warpgroup_thread() % 32),
        scratch_(shared + Storage::SCRATCH + warp_ * sizeof(SparseSwapAbScratch)),
        kv_(advanced(KvState(), warp_)) {}

  MLA_DEVICE void run() {
    Scheduler scheduler(params_, scratch_ + TopkLists::BYTES);
    TileState tiles;
    while (scheduler.more()) {
      const int token = scheduler.token();
      const int keys = lists().open(params_, token);
      const WorkTile tile = scheduler.take(token, keys);
      if (warp_ == TILE_WARP) this->publish(tile, 0, tiles, TILE_WARP * 32);
      if (tile.keys() == 0) continue;
      lists().set_tile(tile.first_key, tile.end_key);
      if (warp_ == Q_WARP) this->load_q_apart(token, lane_, q_parity_);
      copy_keys((tile.keys() + Traits::STEP_KEYS - 1) / Traits::STEP_KEYS);
    }
    if (warp_ == TILE_WARP) this->publish(WorkTile{}, END_OF_WORK, tiles, TILE_WARP * 32);
  }

 private:
  MLA_DEVICE TopkLists lists() const { return TopkLists(scratch_); }

  // The lanes look up the keys of two stages at a time, and load the next two stages' indices meanwhile.
  MLA_DEVICE void copy_keys(int steps) {
    int index = load_index(0);
    uint64_t record = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (step % 2 == 0) {
        record = record_of(step, index);
        index = load_index(step + 2);
      }
      this->wait_for_empty(kv_);
      copy_stage(record, step % 2 * STAGE_KEYS);
      kv_ = advanced(kv_, Traits::STEP_STAGES);
    }
  }

  // This lane's key of this step and the next, by its number within the work tile.
  MLA_DEVICE int key_of(int step) const {
    return (step + lane_ / STAGE_KEYS) * Traits::STEP_KEYS + warp_ * STAGE_KEYS + lane_ % STAGE_KEYS;
  }
  // -1 behind the tile's end.
  MLA_DEVICE int load_index(int step) const {
    const int32_t* at = lists().index_at(key_of(step));
    return at != nullptr ? ld_global(at) : -1;
  }
  // The address of the record that an index names; 0 where it names none.
  MLA_DEVICE uint64_t record_of(int step, int index) const {
    const SelectedToken token = lists().token_of(params_, key_of(step), index);
    if (!token.present) return 0;
    return reinterpret_cast<uint64_t>(token.page) + token.in_page * static_cast<uint64_t>(KvFormat::TOKEN_BYTES);
  }

  // Starts to copy 16 records, whose addresses the lanes from `first` on have, half a warp each. Absent ones become
  // zeros. The stage is full when all have come.
  MLA_DEVICE void copy_stage(uint64_t record, int first) const {
    constexpr int PIECES = KvFormat::TOKEN_BYTES / 16;
    static_assert(PIECES > 32 && PIECES <= 48, "half a warp copies a record in three turns");
    const int half = lane_ / 16, piece = lane_ % 16;
    const uint32_t to = shared_ + kv_.stage * Traits::STAGE_BYTES + half * KvFormat::TOKEN_BYTES + piece * 16;
#pragma unroll
    for (int pair = 0; pair < STAGE_KEYS / 2; ++pair) {
      const uint64_t found = __shfl_sync(~0u, record, first + pair * 2 + half);
      const uint64_t from = found + piece * 16;
      const uint32_t at = to + pair * (2 * KvFormat::TOKEN_BYTES);
      cp_async_zfill<16>(at, from, found != 0);
      cp_async_zfill<16>(at + 256, from + 256, found != 0);
      cp_async_zfill_if<16>(piece < PIECES - 32, at + 512, from + 512, found != 0);
    }
    const uint32_t present = __ballot_sync(~0u, record != 0) >> first & ((1u << STAGE_KEYS) - 1);
    const uint32_t full = barriers_.kv_full(kv_.stage);
    if (lane_ == 0) {
      st_shared(shared_ - Storage::KV + Storage::PRESENT + kv_.stage * 4, present);
      mbarrier_arrive(full);
    }
    cp_async_mbarrier_arrive(full);
  }

  const int warp_;
  const int lane_;
  const uint32_t scratch_;
  uint32_t q_parity_ = 0;
  KvState kv_;  // this warp's stage of the next step
};

}  // namespace mla::sm_90
