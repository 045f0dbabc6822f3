// The producer of sparse decode: selected keys are looked up, copied as they are stored, and dequantised into a stage
// of the KV ring.
//
// Each of the four warps gathers 8 of a stage's 32 keys, in rounds of 4, and synchronises with the others only through
// mbarriers. What it has copied lies in raw stages of its own, one for each round; indices are read a batch of 32 keys
// ahead of the copies.
//
// With ClusterShareKv each CTA brings half of every stage, four of a warp's eight keys, and sends what it has made to
// the peer, whose mbarrier counts the bytes. So the rings of both advance in step: a stage is empty when the readers of
// both CTAs are done with it.
#pragma once

#include "sm_90/decode/producer.hpp"
#include "sm_90/ptx/cp_async.hpp"
#include "sm_90/ptx/dsmem.hpp"
#include "sm_90/sparse_decode/gather_layout.hpp"
#include "sm_90/sparse_decode/staged_lists.hpp"
#include "sm_90/sparse_decode/tile_scheduler.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerDequant : ProducerBase<Traits> {
  using KvFormat = typename Traits::KvFormat;
  using Params = typename Traits::Params;
  using Base = ProducerBase<Traits>;
  using Copying = CopyLayout<Traits>;
  static constexpr bool ANY_V41 = KvFormat::ANY_V41;
  using Lists = typename KvFormat::Lists;
  static constexpr int STAGE_KEYS = Traits::STAGE_KEYS;
  static constexpr bool PAIRED = Traits::Cluster::SHARES_KV;
  static constexpr uint32_t BATCH_STAGES = 32 / Traits::OWN_KEYS;  // whose tokens are looked up together, one by a lane
  static constexpr uint32_t STAGE_ROUNDS = Traits::OWN_KEYS / 4;
  static constexpr uint32_t BATCH_ROUNDS = 8;
  static constexpr bool WHOLE = Traits::RAW_STAGES % STAGE_ROUNDS == 0;  // raw stages hold whole stages

 public:
  MLA_DEVICE ProducerDequant(const Params& params, uint32_t shared)
      : Base(params, shared),
        lane_(read_thread_id() % 32),
        warp_(warp_uniform(read_thread_id() / 32)),
        cluster_warp_((PAIRED ? Traits::Cluster::sharing_rank() * Traits::PRODUCER_WARPS : 0) + warp_),
        raw_(shared + Traits::RAW + warp_ * Traits::RAW_BYTES),
        to_peer_(PAIRED ? warp_uniform(map_to_peer(shared) - shared) : 0) {}

  MLA_DEVICE void run() {
    Scheduler scheduler(this->params_, scratch() + Lists::BYTES);
    while (scheduler.more()) {
      const int token = scheduler.token();
      const int keys = lists().open(this->params_, token);
      WorkTile tile = scheduler.take(token, keys);
      if constexpr (ANY_V41)
        tile.end_key = tile.first_key + lists().template set_tile<STAGE_KEYS>(tile.first_key, tile.end_key) * STAGE_KEYS;
      publish(tile, 0, scheduler.taken() - 1);
      if (tile.keys() == 0) continue;
      if constexpr (!ANY_V41) lists().set_tile(tile.first_key, tile.end_key);
      fetch_indices(0);
      cp_async_commit();
      cp_async_wait<0>();
      const uint32_t stages = (tile.keys() + STAGE_KEYS - 1) / STAGE_KEYS;
      load_quantised(token, stages);
    }
    publish(WorkTile{}, END_OF_WORK, scheduler.taken());
    if constexpr (PAIRED) this->wait_for_peer_readers(kv_);
  }

 private:
  MLA_DEVICE uint32_t first_key() const { return cluster_warp_ * Traits::OWN_KEYS; }
  MLA_DEVICE uint32_t scratch() const {
    return this->shared_ - Base::Storage::KV + Traits::SCRATCH + warp_ * Traits::SCRATCH_BYTES;
  }
  MLA_DEVICE Lists lists() const { return Lists(scratch()); }

  // Returns the lane, opaque to the compiler, so that values derived from it are computed anew instead of kept in
  // registers.
  MLA_DEVICE uint32_t opaque_lane() const {
    uint32_t lane = lane_;
    pin_registers(lane);
    return lane;
  }

  MLA_DEVICE void publish(const WorkTile& tile, int info, int number) {
    if constexpr (Traits::PRODUCER_WARPS > 4)
      if (warp_ != 0) return;
    typename Base::TileState tiles{number % Traits::TILE_STAGES,
                                   static_cast<uint32_t>(number / Traits::TILE_STAGES) % 2};
    Base::publish(tile, info, tiles, 0);
  }

  // The queries, in two stages as the other roles expect them. One warp loads them; the others only say that they bring
  // nothing of these stages.
  MLA_DEVICE void load_q(int token) {
    if constexpr (Traits::Q_APART) {
      if (warp_ == 0) this->load_q_apart(token, lane_, q_parity_);
    } else {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        this->wait_for_tma_stage(this->kv_stage(kv_));
        if (lane_ == 0) {
          if (warp_ != 0)
            mbarrier_arrive(this->barriers_.kv_full(kv_.stage));
          else
            this->load_q_half({this->params_, token, first_row()}, half, kv_);
        }
        kv_.next();
      }
      __syncwarp();
    }
  }

  // A lane's key of a batch, by its number within the tile.
  MLA_DEVICE int key_of(uint32_t batch, uint32_t lane) const {
    return first_key() + batch * (BATCH_STAGES * STAGE_KEYS) + lane / Traits::OWN_KEYS * STAGE_KEYS +
           lane % Traits::OWN_KEYS;
  }

  // Starts to copy the index of this lane's key of a batch to where only this lane reads it.
  MLA_DEVICE void fetch_indices(uint32_t batch) {
    const uint32_t lane = opaque_lane();
    const int key = key_of(batch, lane);
    const uint32_t to = scratch() + Traits::SCRATCH_INDICES + lane * 4;
    const int32_t* at = lists().index_at(key);
    if (at != nullptr)
      cp_async_zfill<4>(to, reinterpret_cast<uint64_t>(at), true);
    else
      st_shared(to, -1);
  }

  // Indices have arrived: writes the tokens of a batch, for all lanes to read, and which of them are present; then
  // starts the next batch's indices. A token that is absent has no address.
  MLA_DEVICE void look_up(uint32_t batch) {
    const uint32_t lane = opaque_lane();
    const int key = key_of(batch, lane);
    const int index = ld_shared<int>(scratch() + Traits::SCRATCH_INDICES + lane * 4);
    const SelectedToken token = lists().token_of(this->params_, key, index);
    const uint32_t stage = lane % BATCH_STAGES;
    const uint32_t which = __ballot_sync(~0u, token.present) >> stage * Traits::OWN_KEYS;
    const uint32_t bits = which % (1u << Traits::OWN_KEYS) << (Traits::Q_APART ? 0 : first_key());
    st_shared(present_at(batch * BATCH_STAGES + stage), bits);
    uint64_t row = 0;
    if (token.present) row = reinterpret_cast<uint64_t>(token.page) + KvFormat::row_at(this->params_, token);
    st_shared(scratch() + Traits::SCRATCH_ROWS + lane * 8, row);
    if constexpr (KvFormat::SCALES_APART)
      st_shared(scratch() + Traits::SCRATCH_SCALES + lane * 4, KvFormat::to_scales(this->params_, token));
    fetch_indices(batch + 1);
    __syncwarp();
  }

  // This warp's keys of a stage that are present, each the bit of its number in the stage, or, with Q_APART, among the
  // warp's. There is room for two
  // batches, so that a batch that is looked up early does not overwrite what is still needed.
  MLA_DEVICE uint32_t present_at(uint32_t stage) const {
    return scratch() + Traits::SCRATCH_PRESENT + stage % (2 * BATCH_STAGES) * 4;
  }
  MLA_DEVICE uint32_t present_of(uint32_t stage) const { return ld_shared<uint32_t>(present_at(stage)); }

  // Marks the stage complete as far as this warp goes, and says which of its keys are present. A thread waiting for the
  // stage fences before wgmma reads it: a fence here might wait for the copies in flight. Only a warp that sends fences
  // here.
  MLA_DEVICE void complete(uint32_t present) {
    const uint32_t full = this->barriers_.kv_full(kv_.stage);
    const uint32_t word = this->shared_ - Base::Storage::KV + Traits::PRESENT + kv_.stage * Traits::PRESENT_BYTES +
                          cluster_warp_ * 4;
    __syncwarp();
    if constexpr (PAIRED) named_barrier_sync<64>(PEER_SEND_BARRIER + warp_ / 2);
    if (lane_ == 0) {
      st_shared(word, present);
      if constexpr (PAIRED) {
        mbarrier_expect_tx(full, Traits::GROUP_BYTES / 2 + 4);
        peer_store_async(word + to_peer_, present, full + to_peer_);
        if (((kv_.stage ^ warp_) & 1) == 0) send(full + to_peer_);
      } else {
        mbarrier_arrive(full);
      }
    }
    kv_.next();
  }

  // Sends eight keys of the stage, of two warps that have met, to the peer. The two warps alternate, stage by stage.
  MLA_DEVICE void send(uint32_t peer_full) const {
    fence_proxy_async();
    const uint32_t from = this->shared_ + kv_.stage * Traits::STAGE_BYTES + first_key() / 8 * Traits::GROUP_BYTES;
    peer_copy(from + to_peer_, from, Traits::GROUP_BYTES, peer_full);
  }

  // Quantised tokens, four keys a round, copied as many rounds ahead of their use as there are raw stages.
  MLA_DEVICE void load_quantised(int token, uint32_t stages) {
    const uint32_t rounds = stages * STAGE_ROUNDS;
    look_up(0);
#pragma unroll 1
    for (uint32_t i = 0; i < Traits::RAW_STAGES; ++i) {
      const Copying copying(opaque_lane(), scratch());
      copy_round(i < rounds, tokens_of(i, copying), raw_ + i * Traits::RAW_STAGE_BYTES, copying);
    }
    load_q(token);
    Position at{0, raw_, false};
    if constexpr (ANY_V41) {
#pragma unroll 1
      for (int pool = 0; pool < MAX_POOLS; ++pool) {
        const uint32_t end = lists().template stages_up_to<STAGE_KEYS>(pool) * STAGE_ROUNDS;
        if (end == at.round) continue;
        if (KvFormat::is_fp4(this->params_, pool))
          dequantise<Fp4Round<Traits>>(at, end, rounds);
        else
          dequantise<E4m3Round<Traits>>(at, end, rounds);
      }
    } else {
      dequantise<E4m3Round<Traits>>(at, rounds, rounds);
    }
  }

  // The next round of a tile, where its raw tokens lie, and whether its KV stage was seen to be empty.
  struct Position {
    uint32_t round;
    uint32_t raw_stage;
    bool empty;
  };

  // Dequantises the rounds up to `end` of a tile's `rounds`, and copies ahead. What is read from shared memory is read
  // long before it is needed: while wgmma reads at full rate, loads answer late.
  template <class Round>
  MLA_DEVICE void dequantise(Position& at, uint32_t end, uint32_t rounds) {
    using Layout = typename Round::Layout;
    constexpr uint32_t RAW_STAGES = Traits::RAW_STAGES;
    Layout layout(opaque_lane(), first_key(), scratch());
    layout.keep();
    cp_async_wait<RAW_STAGES - 1>();
    __syncwarp();
    Round now;
    now.load(0, at.raw_stage, layout);  // a round ahead, as the next part
    now.load(1, at.raw_stage, layout);
    uint32_t raw_stage = at.raw_stage;
    bool empty = at.empty;
#pragma unroll 1
    for (uint32_t round = at.round; round < end; round += STAGE_ROUNDS) {
      const uint32_t keys = this->shared_ + kv_.stage * Traits::STAGE_BYTES;
      uint32_t present = 0;
#pragma unroll
      for (uint32_t in_stage = 0; in_stage < STAGE_ROUNDS; ++in_stage) {
        const bool last = in_stage + 1 == STAGE_ROUNDS;
        const uint32_t behind = WHOLE ? in_stage : 0, next = round + in_stage + RAW_STAGES - behind;
        const bool may_begin = (in_stage + RAW_STAGES) % STAGE_ROUNDS == 0;
        if (may_begin && next % BATCH_ROUNDS == 0 && next < rounds) look_up(next / BATCH_ROUNDS);
        RopePiece<Traits> rope;
        if constexpr (Traits::HAS_ROPE) rope.load(raw_stage + layout.rope);
        now.load(2, raw_stage, layout);
        const uint32_t to = (keys + layout.to) ^ in_stage * Layout::step(4);
        if (in_stage == 0 && !empty) this->wait_for_empty(kv_);
        now.store(0, to, layout);
        if constexpr (Traits::HAS_ROPE) rope.store((keys + layout.row) ^ in_stage * Layout::step(4));
        now.load(3, raw_stage, layout);
        const Tokens ahead = tokens_of(next % BATCH_ROUNDS + behind, layout);
        now.store(1, to, layout);
        cp_async_wait<RAW_STAGES - 2>();
        __syncwarp();  // every lane's copies have landed, and every lane is done with this raw stage
        copy_round(next < rounds, ahead, raw_stage, layout);
        raw_stage = WHOLE && !last ? raw_stage + Traits::RAW_STAGE_BYTES : raw_stage_after(raw_stage);
        now.load(0, raw_stage, layout);
        now.load(1, raw_stage, layout);
        if (last) present = present_of(round / STAGE_ROUNDS);
        now.store(2, to, layout);
        if (last) empty = next_stage_is_empty();
        now.store(3, to, layout);
      }
      complete(present);
    }
    at = {end, raw_stage, empty};
  }

  // Returns whether the stage after this one was seen to be empty.
  MLA_DEVICE bool next_stage_is_empty() const {
    PipelineState<Traits::STAGES> following = kv_;
    following.next();
    return mbarrier_test(this->barriers_.kv_empty(following.stage), following.parity ^ 1);
  }

  MLA_DEVICE uint32_t raw_stage_after(uint32_t raw_stage) const {
    const uint32_t after = raw_stage + Traits::RAW_STAGE_BYTES;
    return after == raw_ + Traits::RAW_BYTES ? raw_ : after;
  }

  // The addresses of a lane's two keys of a round.
  struct Tokens {
    uint64_t rows[2];       // addresses, or 0
    uint32_t to_scales[2];  // from there to the scales, as the format counts, where they lie apart
  };

  // The tokens of a round of the batch that was looked up last.
  MLA_DEVICE static Tokens tokens_of(uint32_t round, const Copying& layout) {
    Tokens tokens{{0, 0}, {0, 0}};
    ld_shared_v2(layout.token + round * 32, tokens.rows);
    if constexpr (KvFormat::SCALES_APART) ld_shared_v2(layout.to_scales + round * 16, tokens.to_scales);
    return tokens;
  }

  // Starts to copy a round's keys, 16 lanes a key, to a raw stage. A group is committed even when no such round is
  // left, because groups are counted.
  MLA_DEVICE static void copy_round(bool active, const Tokens& tokens, uint32_t raw_stage, const Copying& layout) {
    const uint32_t part = layout.copied % 1024;
    if constexpr (ANY_V41)
      copy_any_v41(active, tokens, raw_stage, layout.copied / 1024 * 2, part);
    else
      copy_one_format(active, tokens, raw_stage, layout, part);
    cp_async_commit();
  }

  MLA_DEVICE static void copy_one_format(bool active, const Tokens& tokens, uint32_t raw_stage, const Copying& layout,
                                         uint32_t part) {
    const uint32_t to = raw_stage + layout.copied;
    const uint32_t tail = raw_stage + Traits::TAILS + layout.copied / 1024 * (2 * KvFormat::TAIL) + part;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool present = tokens.rows[i] != 0;
      const uint64_t from = tokens.rows[i] + part;
      cp_async_zfill_if<16>(active, to + i * 512, from, present);
      cp_async_zfill_if<16>(active, to + i * 512 + 256, from + 256, present);
      if constexpr (KvFormat::TAIL_PIECES != 0)
        cp_async_zfill_if<16>(active && part < KvFormat::TAIL_PIECES * 16, tail + i * KvFormat::TAIL, from + 512, present);
      if constexpr (KvFormat::SCALES_APART)
        cp_async_zfill_if<KvFormat::SCALE_BYTES>(
            active && part == 0, tail + i * KvFormat::TAIL + KvFormat::TAIL_SCALES,
            tokens.rows[i] + tokens.to_scales[i] * uint64_t{KvFormat::SCALE_BYTES}, present);
    }
  }

  // The keys of a round are of one pool, and so of one size.
  MLA_DEVICE static void copy_any_v41(bool active, const Tokens& tokens, uint32_t raw_stage, uint32_t key,
                                      uint32_t part) {
    const bool fp4 = (tokens.to_scales[0] & KvFormat::FP4) != 0;
    const uint32_t apart = fp4 ? KvFormat::FP4_BYTES : 512;
    const uint32_t to = raw_stage + key * apart + part;
    const uint32_t scales_apart = fp4 ? KvFormat::FP4_BYTES : KvFormat::TAIL;
    const uint32_t scales = raw_stage + (fp4 ? 256 : Traits::TAILS) + key * scales_apart + part;
    const bool has_scales = part < (fp4 ? 32 : 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool present = tokens.rows[i] != 0;
      const uint64_t from = tokens.rows[i] + part;
      cp_async_zfill_if<16>(active, to + i * apart, from, present);
      cp_async_zfill_if<16>(active && !fp4, to + i * apart + 256, from + 256, present);
      cp_async_zfill_if<16>(active && has_scales, scales + i * scales_apart,
                            from + (tokens.to_scales[i] & ~KvFormat::FP4) * uint64_t{16}, present);
    }
  }

  const uint32_t lane_;
  const uint32_t warp_;          // the producer's warps are a block's first; the value is warp-uniform, like the next
  const uint32_t cluster_warp_;  // this warp's number among those of both CTAs that each bring OWN_KEYS of a stage
  const uint32_t raw_;
  const uint32_t to_peer_;  // from an address of this CTA to the peer's
  PipelineState<Traits::STAGES> kv_;
  uint32_t q_parity_ = 0;  // with Q_APART
};

}  // namespace mla::sm_90
