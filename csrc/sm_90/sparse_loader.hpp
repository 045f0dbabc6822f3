// Selected keys on their way to shared memory: looked up, copied as they are stored, dequantised into a stage of the
// ring.
//
// A warp brings eight keys of every stage, two at a time, and shares nothing with the others but the barriers. What it
// has copied lies in memory of its own, PAIRS deep; indices are read a batch of 32 keys ahead of the copies.
//
// Of a cluster of two blocks each brings half of every stage, four of a warp's eight keys, and stores them twice: in its
// own memory and in the other's, whose barrier counts their bytes. So the rings of both go in step: a stage is empty when
// the readers of both blocks are done with it.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/dequantise.hpp"
#include "sm_90/shared_copies.hpp"
#include "sm_90/sparse_work.hpp"

namespace mla::sm90 {

template <class Policy>
class SparseLoader : Loader<Policy> {
  using Record = typename Policy::Record;
  using Params = typename Policy::Params;
  using Base = Loader<Policy>;
  static constexpr bool PAIRED = Policy::PAIRED;
  static constexpr uint32_t STAGE_PAIRS = Policy::OWN_KEYS / 2;
  static constexpr uint32_t BATCH_STAGES = 32 / Policy::OWN_KEYS;  // whose tokens are looked up at once: one to a lane
  static constexpr uint32_t BATCH_PAIRS = 16;
  static constexpr uint32_t RAW_STAGES = Record::PAIRS / STAGE_PAIRS;  // of which there is room
  static_assert(!Record::STORED || (RAW_STAGES * STAGE_PAIRS == Record::PAIRS && RAW_STAGES > 1), "in whole stages");
  // What the other block's warp of the same number stores in a stage of this one: keys, and a word of bits.
  static constexpr int PEER_BYTES = Policy::OWN_KEYS * Policy::DEPTH * 2 + 4;

 public:
  MLA_DEVICE SparseLoader(const Params& params, uint32_t shared)
      : Base(params, shared),
        lane_(thread_id_now() % 32),
        raw_(shared + Policy::RAW_OFFSET + warp() * Policy::RAW_BYTES),
        to_peer_(PAIRED ? at_peer(shared) - shared : 0) {}

  MLA_DEVICE void run() {
    SparseWork work(this->params_, notes() + Lists::BYTES);
    meet<Policy>();  // the barriers are there
    while (work.more()) {
      const int token = work.token();
      const int keys = lists().open(this->params_, token);
      const Item item = work.take(token, keys);
      publish(item, work.taken() - 1);
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
    Item over{};
    over.stop = 1;
    publish(over, work.taken());
    // The other block's warps arrive here as long as a stage is not empty: until then this block must not be gone.
    if constexpr (PAIRED) {
#pragma unroll 1
      for (int stage = 0; stage < Policy::STAGES; ++stage, ring_.next()) wait_for_empty(ring_);
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
  // Which half of a warp's keys of a stage are this block's.
  MLA_DEVICE static uint32_t half() { return PAIRED ? cluster_rank() : 0; }
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

  MLA_DEVICE void publish(const Item& item, int number) {
    Ring<Policy::ITEMS> items{number % Policy::ITEMS, static_cast<uint32_t>(number / Policy::ITEMS) % 2};
    Base::publish(item, items);
  }

  // The queries, in two stages as the roles expect them: one asks for them, the other warps only say that they bring
  // nothing of these stages.
  MLA_DEVICE void bring_q(int token) {
    const int heads = this->params_.heads;
    const int first_row = blockIdx.x % this->params_.row_tiles * ROWS;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t full = this->barriers_.kv_full(ring_.stage);
      wait_for_empty(ring_);
      if (lane_ == 0) {
        if (warp() != 0) {
          barrier_arrive(full);
        } else {
          const uint32_t stage = this->shared_ + ring_.stage * Policy::STAGE_BYTES;
          barrier_expect(full, Policy::Q_BOXES * 64 * min(ROWS, heads));
#pragma unroll 1
          for (int box = 0; box < Policy::Q_BOXES; ++box)
            copy_box(stage + box * Policy::Q_BOX_BYTES, &this->params_.q_map_0, half * (Policy::DEPTH / 2) + box * 32,
                     static_cast<int64_t>(token) * heads + first_row, full);
        }
      }
      ring_.next();
    }
    __syncwarp();
  }

  MLA_DEVICE void wait_for_empty(const Ring<Policy::STAGES>& at) const {
    barrier_wait(this->barriers_.kv_empty(at.stage), at.parity ^ 1);
  }

  // A lane's key of a batch, by its number within the item.
  MLA_DEVICE static int key_of(uint32_t batch, uint32_t lane) {
    return warp() * Policy::WARP_KEYS + half() * Policy::OWN_KEYS + batch * (BATCH_STAGES * Policy::KEYS) +
           lane / Policy::OWN_KEYS * Policy::KEYS + lane % Policy::OWN_KEYS;
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
    const uint32_t which = __ballot_sync(~0u, token.present);
    if (lane == 0) asm volatile("st.shared.b32 [%0], %1;" ::"r"(present_at(batch)), "r"(which) : "memory");
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

  // Where a batch's bits lie: bit l is lane l's token. Of the last batch with an even number, and with an odd one.
  MLA_DEVICE uint32_t present_at(uint32_t batch) const { return notes() + Policy::NOTES_PRESENT + batch % 2 * 4; }

  // The address of the token of a lane of the batch, or 0.
  MLA_DEVICE uint64_t row_of(uint32_t lane) const {
    uint64_t row;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(row) : "r"(notes() + Policy::NOTES_ROWS + lane * 8) : "memory");
    return row;
  }

  // This warp's keys of a stage that are there, a bit each: those of its eight that this block brings.
  MLA_DEVICE uint32_t present_of(uint32_t stage) const {
    static_assert(Policy::WARP_KEYS == 8, "a warp's bits are a byte");
    uint32_t present;
    asm volatile("ld.shared.u8 %0, [%1];"
                 : "=r"(present)
                 : "r"(present_at(stage / BATCH_STAGES) + stage % BATCH_STAGES * Policy::OWN_KEYS / 8)
                 : "memory");
    if constexpr (PAIRED) present = (present >> stage % 2 * 4 & 15) << half() * 4;
    return present;
  }

  // Tells them to the scores, beside the stage.
  MLA_DEVICE void tell(uint32_t present) const {
    const uint32_t words =
        this->shared_ - Policy::KV_OFFSET + Policy::PRESENT_OFFSET + ring_.stage * Policy::PRESENT_BYTES;
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(words + warp()), "r"(present) : "memory");
    if constexpr (PAIRED)
      if (lane_ == 0)
        peer_store4(words + Policy::PEER_PRESENT + warp() * 4 + to_peer_, present << warp() * 8, peer_full());
  }

  // The other block's barrier of the stage that is being brought.
  MLA_DEVICE uint32_t peer_full() const { return this->barriers_.kv_full(ring_.stage) + to_peer_; }

  // 16 bytes of a stage, here and, of a pair, there.
  MLA_DEVICE void store(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) const {
    store16(to, a, b, c, d);
    if constexpr (PAIRED) peer_store16(to + to_peer_, a, b, c, d, peer_full());
  }

  // The stage is complete as far as this warp goes. Who waits for it fences before wgmma reads it: a fence here might
  // wait for the copies in flight.
  MLA_DEVICE void complete() {
    __syncwarp();
    if (lane_ == 0) {
      const uint32_t full = this->barriers_.kv_full(ring_.stage);
      if constexpr (PAIRED)
        barrier_expect(full, PEER_BYTES);
      else
        barrier_arrive(full);
    }
    ring_.next();
  }

  // Stored values, by pairs of keys: copied PAIRS - 1 pairs ahead. A turn of the loop is a stage.
  MLA_DEVICE void bring_stored(int token, uint32_t stages) {
    const uint32_t pairs = stages * STAGE_PAIRS;
    look_up(0);
#pragma unroll 1
    for (uint32_t i = 0; i + 1 < Record::PAIRS; ++i)
      issue(i < pairs, token_of(i, lane_), raw_ + i * Policy::PAIR_BYTES);
    bring_q(token);
    copies_wait<Record::PAIRS - 2>();
    __syncwarp();
    uint32_t first[4], last[4], scale[2];
    load_pair(raw_, lane_anew(), first, last, scale);
#pragma unroll 1
    for (uint32_t stage = 0, left = pairs; left != 0; ++stage, left -= STAGE_PAIRS) {
      const uint32_t here = slots_of(stage);
      const uint32_t there = slots_of(stage + 1);
      const uint32_t before = slots_of(stage + RAW_STAGES - 1);
      const uint32_t lane = lane_anew();
      const uint32_t second = second_of(lane);
      const uint32_t block = block_of(lane);
      const uint32_t keys = this->shared_ + ring_.stage * Policy::STAGE_BYTES + warp() * (Policy::WARP_KEYS * 128);
      // The second half of eight keys: four rows of 128 bytes on, and in the swizzle as many pieces.
      const uint32_t second_half = half() * (4 * 128 + 4 * 16);
      const uint32_t to =
          (keys + block * Policy::BLOCK_BYTES + second * 128 + ((lane % 4 * 2) ^ second) * 16) ^ second_half;
      // Lanes 0..15 move the values that are bf16 already: eight a key.
      const uint32_t row =
          (keys + Record::LATENT / 64 * Policy::BLOCK_BYTES + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16) ^ second_half;
      const uint32_t present = present_of(stage);
      wait_for_empty(ring_);
#pragma unroll
      for (uint32_t pair = 0; pair < STAGE_PAIRS; ++pair) {
        const uint32_t slot = here + pair * Policy::PAIR_BYTES;
        const uint32_t after = pair + 1 < STAGE_PAIRS ? slot + Policy::PAIR_BYTES : there;
        const uint32_t at = (to ^ pair * 32) + pair * 256;
        constexpr uint32_t AHEAD = Record::PAIRS - 1;
        const uint32_t next = stage * STAGE_PAIRS + pair + AHEAD;
        if (pair == 1 && next % BATCH_PAIRS == 0 && pair + AHEAD < left) look_up(next / BATCH_PAIRS);
        // Read well before `issue`: with wgmma reading at full rate, shared memory answers late.
        const Token token_ahead = token_of(next % BATCH_PAIRS, lane);
        const Factor factors[2] = {factor_of(scale[0]), factor_of(scale[1])};
        // The next pair is loaded as soon as this one's registers are free.
        if (__builtin_expect(__any_sync(~0u, factors[0].large || factors[1].large), 0)) {
          store_piece<true>(at, block, first, large_factor_of(scale[0]));
          store_piece<true>(at + 4 * Policy::BLOCK_BYTES, block + 4, last, large_factor_of(scale[1]));
          load16(slot + rope_at(), first);
          if (lane < 16) store((row ^ pair * 32) + pair * 256, first[0], first[1], first[2], first[3]);
          copies_wait<Record::PAIRS - 3>();
          __syncwarp();
          load_pair(after, lane, first, last, scale);
        } else {
          uint32_t rope[4];
          store_piece<false>(at, block, first, factors[0]);
          load16(slot + rope_at(), rope);
          copies_wait<Record::PAIRS - 3>();
          __syncwarp();  // every lane's copies are there
          load16(piece_at(after, lane), first);
          load_scales(after, second, block, scale);
          store_piece<false>(at + 4 * Policy::BLOCK_BYTES, block + 4, last, factors[1]);
          load16(piece_at(after, lane) + 256, last);
          if (lane < 16) store((row ^ pair * 32) + pair * 256, rope[0], rope[1], rope[2], rope[3]);
        }
        if (pair == 0) tell(present);
        // Into the slot before this one: every lane was done with it before the last __syncwarp.
        issue(pair + AHEAD < left, token_ahead,
              pair == 0 ? before + (STAGE_PAIRS - 1) * Policy::PAIR_BYTES : slot - Policy::PAIR_BYTES);
      }
      complete();
    }
  }

  // Where the pairs of a stage lie as they came.
  MLA_DEVICE uint32_t slots_of(uint32_t stage) const {
    return raw_ + stage % RAW_STAGES * (STAGE_PAIRS * Policy::PAIR_BYTES);
  }

  // Lanes 4..7 of each 8 take the second key of a pair, and of another column block than the others: so eight lanes
  // read and write all banks, the first key's pieces at even places and the second's, by the swizzle, at odd ones.
  MLA_DEVICE static uint32_t second_of(uint32_t lane) { return lane / 4 % 2; }
  MLA_DEVICE static uint32_t block_of(uint32_t lane) { return lane / 8 ^ second_of(lane); }  // and 4 more
  MLA_DEVICE static uint32_t piece_at(uint32_t slot, uint32_t lane) {
    return slot + second_of(lane) * 512 + block_of(lane) * 64 + lane % 4 * 16;
  }

  MLA_DEVICE void load_pair(uint32_t slot, uint32_t lane, uint32_t (&first)[4], uint32_t (&last)[4],
                            uint32_t (&scale)[2]) const {
    load16(piece_at(slot, lane), first);
    load16(piece_at(slot, lane) + 256, last);
    load_scales(slot, second_of(lane), block_of(lane), scale);
  }

  // Where a lane's key of a pair lies.
  struct Token {
    uint64_t row;   // address, or 0
    int to_scales;  // from there to the scales, where they lie apart
  };

  // Lanes 0..15 of a pair of the batch that was looked up last take its first key, the others its second.
  MLA_DEVICE Token token_of(uint32_t pair, uint32_t lane) const {
    const uint32_t source = pair * 2 + lane / 16;
    Token token{row_of(source), 0};
    if constexpr (Record::SCALES_APART)
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(token.to_scales)
                   : "r"(notes() + Policy::NOTES_SCALES + source * 4)
                   : "memory");
    return token;
  }

  // Begins to copy a pair, 16 lanes a key, to `slot`. There is a group for it even when no such pair is left: groups
  // are counted.
  MLA_DEVICE void issue(bool any, const Token& token, uint32_t slot) {
    if (any) {
      const uint32_t lane = lane_anew();
      const uint32_t piece = lane % 16;
      const uint64_t row = token.row;
      const bool present = row != 0;
      const uint64_t from = row + piece * 16;
      const uint32_t to = slot + lane / 16 * 512 + piece * 16;
      copy_present<16>(to, from, present);
      copy_present<16>(to + 256, from + 256, present);
      // Lanes that have no piece of their own in the tail copy the last one again: cheaper than a branch.
      const uint32_t last = min(piece, Record::TAIL_PIECES - 1u) * 16;
      const uint32_t tail = slot + 1024 + lane / 16 * Record::TAIL;
      copy_present<16>(tail + last, row + 512 + last, present);
      if constexpr (Record::SCALES_APART) {
        copy_present<8>(tail + Record::TAIL_SCALES, row + token.to_scales, present);
      }
    }
    copies_commit();
  }

  // Where lanes 0..15 find their 16 bytes of bf16 values in a pair; the others repeat them.
  MLA_DEVICE uint32_t rope_at() const {
    const uint32_t lane = lane_anew();
    const uint32_t second = lane / 8 % 2;
    const uint32_t piece = lane % 8;
    if constexpr (Record::SCALES_APART)
      return piece < 4 ? second * 512 + 448 + piece * 16 : 1024 + second * Record::TAIL + (piece - 4) * 16;
    else
      return 1024 + second * Record::TAIL + 16 + piece * 16;
  }

  // The scales of a lane's two pieces.
  MLA_DEVICE void load_scales(uint32_t pair, uint32_t second, uint32_t block, uint32_t (&scale)[2]) const {
    const uint32_t tail = pair + 1024 + second * Record::TAIL;
    if constexpr (Record::SCALES_APART) {
      const uint32_t at = tail + Record::TAIL_SCALES + block;
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale[0]) : "r"(at) : "memory");
      asm volatile("ld.shared.u8 %0, [%1];"
                   : "=r"(scale[1])
                   : "r"(at + (block < 3 ? 4 : 3))
                   : "memory");  // there are seven
    } else {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scale[0]) : "r"(tail + block / 2 * 4) : "memory");
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scale[1]) : "r"(tail + block / 2 * 4 + 8) : "memory");
    }
  }

  MLA_DEVICE static Factor factor_of(uint32_t scale) {
    if constexpr (Record::SPLIT)
      return Factor::of_any(bit_cast<float>(scale));
    else
      return Factor::of_power(scale);
  }
  MLA_DEVICE static Factor large_factor_of(uint32_t scale) {
    if constexpr (Record::SPLIT)
      return Factor::of_any_large(bit_cast<float>(scale));
    else
      return Factor::of_power_large(scale);
  }

  template <bool LARGE>
  MLA_DEVICE void store_piece(uint32_t to, uint32_t block, const uint32_t (&stored)[4], Factor factor) const {
    uint32_t values[8];
    dequantise<Record::SPLIT, LARGE>(stored, factor, values);
    if (Record::LATENT < 512 && block >= Record::LATENT / 64) return;
    store(to, values[0], values[1], values[2], values[3]);
    store(to ^ 16, values[4], values[5], values[6], values[7]);
  }

  // Rows of bf16 go where they are multiplied, without a stop: four keys of 128 bytes at a time, AHEAD stages in
  // flight.
  MLA_DEVICE void bring_rows(int token, uint32_t stages) {
    constexpr uint32_t AHEAD = Policy::STAGES - 2;
    bring_q(token);
    Ring<Policy::STAGES> filled = ring_;  // ring_ is the next stage to complete
    const uint32_t piece = lane_ % 8;
    const uint32_t slot = lane_ / 8;
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages + AHEAD; ++stage) {
      if (stage < stages) {
        if (stage % BATCH_STAGES == 0) look_up(stage / BATCH_STAGES);
        wait_for_empty(filled);
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
      if (stage < AHEAD) continue;
      copies_wait<AHEAD>();
      tell(present_of(stage - AHEAD));
      complete();
    }
  }

  const uint32_t lane_;
  const uint32_t raw_;
  const uint32_t to_peer_;  // from an address of this block to the other's
  Ring<Policy::STAGES> ring_;
};

}  // namespace mla::sm90
