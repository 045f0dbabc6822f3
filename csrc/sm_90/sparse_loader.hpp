// Selected keys on their way to shared memory: looked up, copied as they are stored, dequantised into a stage of the
// ring.
//
// A warp brings eight keys of every stage, two at a time, and shares nothing with the others but the barriers. What it
// has copied lies in memory of its own, PAIRS deep; indices are read a batch of 32 keys ahead of the copies.
//
// Of a cluster of two blocks each brings half of every stage, four of a warp's eight keys, and stores them twice: in
// its own memory and in the other's, whose barrier counts their bytes. So the rings of both go in step: a stage is
// empty when the readers of both blocks are done with it.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/sparse_places.hpp"
#include "sm_90/sparse_work.hpp"

namespace mla::sm90 {

template <class Policy>
class SparseLoader : Loader<Policy> {
  using Record = typename Policy::Record;
  using Params = typename Policy::Params;
  using Base = Loader<Policy>;
  using Places = SparsePlaces<Policy>;
  using Half = SparseHalf<Policy>;
  static constexpr bool PAIRED = Policy::PAIRED;
  static constexpr uint32_t STAGE_PAIRS = Policy::OWN_KEYS / 2;
  static constexpr uint32_t BATCH_STAGES = 32 / Policy::OWN_KEYS;  // whose tokens are looked up at once: one to a lane
  static constexpr uint32_t BATCH_PAIRS = 16;
  static constexpr uint32_t AHEAD = Policy::PAIRS - 1;  // pairs of keys, that are copied before they are wanted
  static constexpr int SENT_BARRIER = 4;                // and the next: of two warps, whose keys lie in one piece

 public:
  MLA_DEVICE SparseLoader(const Params& params, uint32_t shared)
      : Base(params, shared),
        lane_(thread_id_now() % 32),
        raw_(shared + Policy::RAW_OFFSET + warp() * Policy::RAW_BYTES),
        to_peer_(PAIRED ? at_peer(shared) - shared : 0) {}

  MLA_DEVICE void run() {
    SparseWork work(this->params_, notes() + Lists::BYTES);
    while (work.more()) {
      const int token = work.token();
      const int keys = lists().open(this->params_, token);
      const Item item = work.take(token, keys);
      publish(item, 0, work.taken() - 1);
      if (item.keys() == 0) continue;
      lists().bound(item.first, item.end);
      fetch(0);
      copies_commit();
      copies_wait<0>();
      const uint32_t stages = (item.keys() + Policy::KEYS - 1) / Policy::KEYS;
      if constexpr (Record::STORED)
        bring_stored(token, stages);
      else
        bring_rows(token, stages);
    }
    publish(Item{}, OVER, work.taken());
    // The other block's warps arrive here as long as a stage is not empty: until then this block must not be gone.
    if constexpr (PAIRED) {
#pragma unroll 1
      for (int stage = 0; stage < Policy::STAGES; ++stage, ring_.next()) this->wait_for_empty(ring_);
    }
  }

 private:
  // Read anew where it is wanted, like the place of the warp's notes: registers are scarce.
  MLA_DEVICE static uint32_t thread_id_now() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }
  MLA_DEVICE static uint32_t warp() { return thread_id_now() / 32; }  // the loader's are a block's first
  // Its number among those that bring as many keys of a stage each, in order: of both blocks.
  MLA_DEVICE static uint32_t warp_of_all() { return (PAIRED ? cluster_rank() * Policy::LOADER_WARPS : 0) + warp(); }
  MLA_DEVICE static uint32_t first_key() { return warp_of_all() * Policy::OWN_KEYS; }
  MLA_DEVICE uint32_t notes() const {
    return this->shared_ - Policy::KV_OFFSET + Policy::NOTES_OFFSET + warp() * Policy::NOTES_BYTES;
  }
  MLA_DEVICE Lists lists() const { return Lists(notes()); }

  // The lane, so that what follows from it is computed anew instead of kept in registers from turn to turn.
  MLA_DEVICE uint32_t lane_anew() const {
    uint32_t lane = lane_;
    asm volatile("" : "+r"(lane));
    return lane;
  }

  MLA_DEVICE void publish(const Item& item, int what, int number) {
    Ring<Policy::ITEMS> items{number % Policy::ITEMS, static_cast<uint32_t>(number / Policy::ITEMS) % 2};
    Base::publish(item, what, items);
  }

  // The queries, in two stages as the roles expect them: one asks for them, the other warps only say that they bring
  // nothing of these stages.
  MLA_DEVICE void bring_q(int token) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      this->wait_for_stage(ring_);
      if (lane_ == 0) {
        if (warp() != 0)
          barrier_arrive(this->barriers_.kv_full(ring_.stage));
        else
          this->ask_for_half(token * this->params_.heads + first_row(), half, ring_);
      }
      ring_.next();
    }
    __syncwarp();
  }

  // A lane's key of a batch, by its number within the item.
  MLA_DEVICE static int key_of(uint32_t batch, uint32_t lane) {
    return first_key() + batch * (BATCH_STAGES * Policy::KEYS) + lane / Policy::OWN_KEYS * Policy::KEYS +
           lane % Policy::OWN_KEYS;
  }

  // Begins to copy the index of this lane's key of a batch to where only this lane reads it.
  MLA_DEVICE void fetch(uint32_t batch) {
    const uint32_t lane = lane_anew();
    const int key = key_of(batch, lane);
    const uint32_t to = notes() + Policy::NOTES_INDICES + lane * 4;
    const int32_t* at = lists().index_at(key);
    if (at != nullptr)
      copy_present<4>(to, reinterpret_cast<uint64_t>(at), true);
    else
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(-1) : "memory");
  }

  // Indices have come: the tokens of a batch, for all lanes to read, and which of them are there; then the next batch's
  // indices. A token that is not there has no address.
  MLA_DEVICE void look_up(uint32_t batch) {
    const uint32_t lane = lane_anew();
    const int key = key_of(batch, lane);
    int index;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(notes() + Policy::NOTES_INDICES + lane * 4) : "memory");
    const Selected token = lists().token_of(this->params_, key, index);
    const uint32_t stage = lane % BATCH_STAGES;
    const uint32_t which = __ballot_sync(~0u, token.present) >> stage * Policy::OWN_KEYS;
    const uint32_t bits = which % (1u << Policy::OWN_KEYS) << first_key();
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(present_at(batch * BATCH_STAGES + stage)), "r"(bits) : "memory");
    uint64_t row = 0;
    if (token.present)
      row = reinterpret_cast<uint64_t>(token.page) + token.in_page * static_cast<uint64_t>(Record::TOKEN_BYTES);
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(notes() + Policy::NOTES_ROWS + lane * 8), "l"(row) : "memory");
    if constexpr (Record::SCALES_APART) {
      const int to_scales = static_cast<int>(token.tokens * Record::TOKEN_BYTES) -
                            static_cast<int>(token.in_page) * (Record::TOKEN_BYTES - 8);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(notes() + Policy::NOTES_SCALES + lane * 4), "r"(to_scales)
                   : "memory");
    }
    fetch(batch + 1);
    __syncwarp();
  }

  // This warp's keys of a stage that are there, each the bit of its number in the stage. Of two batches, lest a batch
  // that is looked up early overwrites what is wanted yet.
  MLA_DEVICE uint32_t present_at(uint32_t stage) const {
    return notes() + Policy::NOTES_PRESENT + stage % (2 * BATCH_STAGES) * 4;
  }
  MLA_DEVICE uint32_t present_of(uint32_t stage) const {
    uint32_t present;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(present) : "r"(present_at(stage)) : "memory");
    return present;
  }

  // The address of the token of a lane of the batch, or 0.
  MLA_DEVICE uint64_t row_of(uint32_t lane) const {
    uint64_t row;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(row) : "r"(notes() + Policy::NOTES_ROWS + lane * 8) : "memory");
    return row;
  }

  // The other block's barrier of the stage that is being brought.
  MLA_DEVICE uint32_t peer_full() const { return this->barriers_.kv_full(ring_.stage) + to_peer_; }

  // The stage is complete as far as this warp goes; the scores are told which of its keys are there. Who waits for it
  // fences before wgmma reads it: a fence here might wait for the copies in flight. Of two blocks, what two warps have
  // stored is sent to the other block in one piece.
  MLA_DEVICE void complete(uint32_t present) {
    if constexpr (PAIRED) fence_async();
    __syncwarp();
    if constexpr (PAIRED) asm volatile("bar.sync %0, 64;" ::"r"(SENT_BARRIER + warp() / 2) : "memory");
    if (lane_ == 0) {
      const uint32_t word = this->shared_ - Policy::KV_OFFSET + Policy::PRESENT_OFFSET +
                            ring_.stage * Policy::PRESENT_BYTES + warp_of_all() * 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(word), "r"(present) : "memory");
      const uint32_t full = this->barriers_.kv_full(ring_.stage);
      if constexpr (PAIRED) {
        const uint32_t bytes = warp() % 2 == 0 ? Policy::GROUP_BYTES : 0;
        barrier_expect(full, bytes + 4);
        peer_store4(word + to_peer_, present, peer_full());
        const uint32_t from = this->shared_ + ring_.stage * Policy::STAGE_BYTES + first_key() / 8 * Policy::GROUP_BYTES;
        if (bytes != 0) peer_copy(from + to_peer_, from, bytes, peer_full());
      } else {
        barrier_arrive(full);
      }
    }
    ring_.next();
  }

  // Stored values, by pairs of keys, copied AHEAD of their use. A turn of the loop is a stage.
  MLA_DEVICE void bring_stored(int token, uint32_t stages) {
    const uint32_t pairs = stages * STAGE_PAIRS;
    look_up(0);
#pragma unroll 1
    for (uint32_t i = 0; i < AHEAD; ++i)
      issue(i < pairs, token_of(i, places_now()), raw_ + i * Policy::PAIR_BYTES, places_now());
    bring_q(token);
    Places places = places_now();
    if constexpr (PAIRED) places.keep();
    copies_wait<AHEAD - 1>();
    __syncwarp();
    Half first, last;
    first.template load<0>(raw_, places);
    last.template load<1>(raw_, places);
    uint32_t slot = raw_;
    uint32_t before = raw_ + AHEAD * Policy::PAIR_BYTES;
#pragma unroll 1
    for (uint32_t stage = 0, left = pairs; left != 0; ++stage, left -= STAGE_PAIRS) {
      if constexpr (!PAIRED) places = places_now();
      const uint32_t keys = this->shared_ + ring_.stage * Policy::STAGE_BYTES;
      const uint32_t present = present_of(stage);
      this->wait_for_empty(ring_);
#pragma unroll
      for (uint32_t pair = 0; pair < STAGE_PAIRS; ++pair) {
        const uint32_t after = slot_after(slot, pair);
        const uint32_t next = stage * STAGE_PAIRS + pair + AHEAD;
        if (pair == AHEAD % 2 && next % BATCH_PAIRS == 0 && pair + AHEAD < left) look_up(next / BATCH_PAIRS);
        // Read well before `issue`: with wgmma reading at full rate, shared memory answers late.
        const Token token_ahead = token_of(next % BATCH_PAIRS, places);
        uint32_t rope[4];
        const uint32_t row = ((keys + places.row) ^ pair * 32) + pair * 256;
        // The next pair is loaded as soon as this one's registers are free.
        if (__builtin_expect(__any_sync(~0u, first.large() || last.large()), 0)) {
          store_half<true, 0>(keys, pair, places, first);
          store_half<true, 1>(keys, pair, places, last);
          load16(slot + places.rope, rope);
          copies_wait<AHEAD - 2>();
          __syncwarp();
          first.template load<0>(after, places);
          last.template load<1>(after, places);
        } else {
          store_half<false, 0>(keys, pair, places, first);
          load16(slot + places.rope, rope);
          copies_wait<AHEAD - 2>();
          __syncwarp();  // every lane's copies are there
          first.template load<0>(after, places);
          store_half<false, 1>(keys, pair, places, last);
          last.template load<1>(after, places);
        }
        if (lane_ < 16) store16(row, rope[0], rope[1], rope[2], rope[3]);
        // Into the slot before this one: every lane was done with it before the last __syncwarp.
        issue(pair + AHEAD < left, token_ahead, before, places);
        before = slot;
        slot = after;
      }
      complete(present);
    }
  }

  MLA_DEVICE Places places_now() const { return Places(lane_anew(), first_key(), notes()); }

  // Where the pair after the one in `slot`, a stage's number `pair`, lies as it came.
  MLA_DEVICE uint32_t slot_after(uint32_t slot, uint32_t pair) const {
    const uint32_t after = slot + Policy::PAIR_BYTES;
    if (Policy::PAIRS % STAGE_PAIRS == 0 && pair + 1 < STAGE_PAIRS) return after;
    return after == raw_ + Policy::RAW_BYTES ? raw_ : after;
  }

  // Dequantises a pair's half to where it is multiplied.
  template <bool LARGE, int NUMBER>
  MLA_DEVICE static void store_half(uint32_t keys, uint32_t pair, const Places& places, const Half& half) {
    uint32_t values[8];
    half.template dequantised<LARGE>(values);
    if (Record::LATENT < 512 && NUMBER == 1 && places.seventh == places.scale + 3) return;  // there is no eighth line
    const uint32_t to = ((keys + places.to) ^ pair * 32) + pair * 256;
    constexpr uint32_t ON = NUMBER * 4 * Policy::BLOCK_BYTES;
    store16(to + ON, values[0], values[1], values[2], values[3]);
    store16((to ^ 16) + ON, values[4], values[5], values[6], values[7]);
  }

  // Where a lane's key of a pair lies.
  struct Token {
    uint64_t row;   // address, or 0
    int to_scales;  // from there to the scales, where they lie apart
  };

  // Lanes 0..15 of a pair of the batch that was looked up last take its first key, the others its second.
  MLA_DEVICE Token token_of(uint32_t pair, const Places& places) const {
    Token token{0, 0};
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(token.row) : "r"(places.token + pair * 16) : "memory");
    if constexpr (Record::SCALES_APART)
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(token.to_scales)
                   : "r"(notes() + Policy::NOTES_SCALES + (pair * 2 + lane_ / 16) * 4)
                   : "memory");
    return token;
  }

  // Begins to copy a pair, 16 lanes a key, to `slot`. There is a group for it even when no such pair is left: groups
  // are counted.
  MLA_DEVICE static void issue(bool any, const Token& token, uint32_t slot, const Places& places) {
    const bool present = token.row != 0;
    const uint32_t part = places.copied % 256;
    const uint64_t from = token.row + part;
    const uint32_t to = slot + places.copied;
    const uint32_t tail = slot + places.tail;
    const bool in_tail = part < Record::TAIL_PIECES * 16;
    // A version with a branch around the copies by some lanes took 4 % longer for v32 (there all lanes arrived on
    // kv_full, too); predicates for all of dsv4's cost it a spill.
    if constexpr (Record::SCALES_APART) {
      if (any) {
        copy_present<16>(true, to, from, present);
        copy_present<16>(true, to + 256, from + 256, present);
        copy_present<16>(in_tail, tail + part, from + 512, present);
        copy_present<8>(part == 0, tail + Record::TAIL_SCALES, token.row + token.to_scales, present);
      }
    } else {
      copy_present<16>(any, to, from, present);
      copy_present<16>(any, to + 256, from + 256, present);
      copy_present<16>(any && in_tail, tail + part, from + 512, present);
    }
    copies_commit();
  }

  // Rows of bf16 go where they are multiplied, without a stop: four keys of 128 bytes at a time, STAGES_AHEAD
  // in flight.
  MLA_DEVICE void bring_rows(int token, uint32_t stages) {
    constexpr uint32_t STAGES_AHEAD = Policy::STAGES - 2;
    bring_q(token);
    Ring<Policy::STAGES> filled = ring_;  // ring_ is the next stage to complete
    const uint32_t piece = lane_ % 8;
    const uint32_t slot = lane_ / 8;
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages + STAGES_AHEAD; ++stage) {
      if (stage < stages) {
        if (stage % BATCH_STAGES == 0) look_up(stage / BATCH_STAGES);
        this->wait_for_empty(filled);
        const uint32_t to =
            this->shared_ + filled.stage * Policy::STAGE_BYTES + (warp() * Policy::WARP_KEYS + slot) * 128;
#pragma unroll
        for (int i = 0; i < Policy::WARP_KEYS / 4; ++i) {
          const uint32_t source = stage % BATCH_STAGES * Policy::WARP_KEYS + slot + 4 * i;
          const uint64_t found = row_of(source);
          const bool present = found != 0;
          const uint64_t row = found + piece * 16;
          const uint32_t place = to + i * 512 + ((piece ^ (slot + 4 * i)) << 4);
#pragma unroll
          for (int c = 0; c < Policy::COLUMN_BLOCKS; ++c)
            copy_present<16>(place + c * Policy::BLOCK_BYTES, row + c * 128, present);
        }
        filled.next();
      }
      copies_commit();
      if (stage < STAGES_AHEAD) continue;
      copies_wait<STAGES_AHEAD>();
      complete(present_of(stage - STAGES_AHEAD));
    }
  }

  const uint32_t lane_;
  const uint32_t raw_;
  const uint32_t to_peer_;  // from an address of this block to the other's
  Ring<Policy::STAGES> ring_;
};

}  // namespace mla::sm90
