// Selected keys on their way to shared memory: looked up, copied as they are stored, dequantised into a stage of the
// ring.
//
// A warp brings eight keys of every stage, four a turn, and shares nothing with the others but the barriers. What it
// has copied lies in memory of its own, a slot a turn; indices are read a batch of 32 keys ahead of the copies.
//
// Of a cluster of two blocks each brings half of every stage, four of a warp's eight keys, and sends what it has made
// to the other, whose barrier counts the bytes. So the rings of both go in step: a stage is empty when the readers of
// both blocks are done with it.
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
  using Unit = SparseUnit<Policy>;
  static constexpr bool PAIRED = Policy::PAIRED;
  static constexpr uint32_t BATCH_STAGES = 32 / Policy::OWN_KEYS;  // whose tokens are looked up at once: one to a lane
  static constexpr uint32_t STAGE_TURNS = Policy::OWN_KEYS / 4;
  static constexpr uint32_t BATCH_TURNS = 8;
  static constexpr int SENT_BARRIER = 4;  // and the next: of two warps, whose keys lie in one piece

 public:
  MLA_DEVICE SparseLoader(const Params& params, uint32_t shared)
      : Base(params, shared),
        lane_(thread_id_now() % 32),
        warp_(uniform(thread_id_now() / 32)),
        warp_of_all_((PAIRED ? cluster_rank() * Policy::LOADER_WARPS : 0) + warp_),
        raw_(shared + Policy::RAW_OFFSET + warp_ * Policy::RAW_BYTES),
        to_peer_(PAIRED ? uniform(at_peer(shared) - shared) : 0) {}

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
  // Read anew where it is wanted: registers are scarce.
  MLA_DEVICE static uint32_t thread_id_now() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }
  MLA_DEVICE uint32_t first_key() const { return warp_of_all_ * Policy::OWN_KEYS; }
  MLA_DEVICE uint32_t notes() const {
    return this->shared_ - Policy::KV_OFFSET + Policy::NOTES_OFFSET + warp_ * Policy::NOTES_BYTES;
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
      this->wait_for_stage(this->stage(ring_));
      if (lane_ == 0) {
        if (warp_ != 0)
          barrier_arrive(this->barriers_.kv_full(ring_.stage));
        else
          this->ask_for_half(token * this->params_.heads + first_row(), half, ring_);
      }
      ring_.next();
    }
    __syncwarp();
  }

  // A lane's key of a batch, by its number within the item.
  MLA_DEVICE int key_of(uint32_t batch, uint32_t lane) const {
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

  // The stage is complete as far as this warp goes; the scores are told which of its keys are there. Who waits for it
  // fences before wgmma reads it: a fence here might wait for the copies in flight. Only who sends it does so here.
  MLA_DEVICE void complete(uint32_t present) {
    const uint32_t full = this->barriers_.kv_full(ring_.stage);
    const uint32_t word = this->shared_ - Policy::KV_OFFSET + Policy::PRESENT_OFFSET +
                          ring_.stage * Policy::PRESENT_BYTES + warp_of_all_ * 4;
    __syncwarp();
    if constexpr (PAIRED) asm volatile("bar.sync %0, 64;" ::"r"(SENT_BARRIER + warp_ / 2) : "memory");
    if (lane_ == 0) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(word), "r"(present) : "memory");
      if constexpr (PAIRED) {
        barrier_expect(full, Policy::GROUP_BYTES / 2 + 4);
        peer_store4(word + to_peer_, present, full + to_peer_);
        if (((ring_.stage ^ warp_) & 1) == 0) send(full + to_peer_);
      } else {
        barrier_arrive(full);
      }
    }
    ring_.next();
  }

  // Eight keys of the stage, of two warps that have met, to the other block. They take turns, stage by stage.
  MLA_DEVICE void send(uint32_t peer_full) const {
    fence_async();
    const uint32_t from = this->shared_ + ring_.stage * Policy::STAGE_BYTES + first_key() / 8 * Policy::GROUP_BYTES;
    peer_copy(from + to_peer_, from, Policy::GROUP_BYTES, peer_full);
  }

  // Stored values, four keys a turn, copied as many turns ahead of their use as there are slots. What is read from
  // shared memory is read long before it is wanted: with wgmma reading at full rate, it answers late.
  MLA_DEVICE void bring_stored(int token, uint32_t stages) {
    constexpr uint32_t SLOTS = Policy::SLOTS;
    const uint32_t turns = stages * STAGE_TURNS;
    look_up(0);
#pragma unroll 1
    for (uint32_t i = 0; i < SLOTS; ++i)
      issue(i < turns, tokens_of(i, places_now()), raw_ + i * Policy::SLOT_BYTES, places_now());
    bring_q(token);
    Places places = places_now();
    places.keep();
    copies_wait<SLOTS - 1>();
    __syncwarp();
    Unit first, second;  // loaded a turn ahead
    first.load(0, raw_, places);
    second.load(1, raw_, places);
    uint32_t slot = raw_;
    bool empty = false;  // the stage was seen to be
#pragma unroll 1
    for (uint32_t turn = 0; turn < turns; ++turn) {
      const uint32_t next = turn + SLOTS;
      if (next % BATCH_TURNS == 0 && next < turns) look_up(next / BATCH_TURNS);
      uint32_t rope[4];
      load16(slot + places.rope, rope);
      Unit third, fourth;
      third.load(2, slot, places);
      const uint32_t in_stage = turn % STAGE_TURNS;
      const uint32_t keys = this->shared_ + ring_.stage * Policy::STAGE_BYTES;
      const uint32_t to = (keys + places.to) ^ in_stage * Places::on(4);
      const uint32_t row = (keys + places.row) ^ in_stage * Places::on(4);
      if (in_stage == 0 && !empty) this->wait_for_empty(ring_);
      store_unit(0, to, first, places);
      store16(row, rope[0], rope[1], rope[2], rope[3]);
      fourth.load(3, slot, places);
      const Tokens ahead = tokens_of(next % BATCH_TURNS, places);
      store_unit(1, to, second, places);
      copies_wait<SLOTS - 2>();
      __syncwarp();  // every lane's copies are there, and every lane is done with this slot
      issue(next < turns, ahead, slot, places);
      slot = slot_after(slot);
      first.load(0, slot, places);
      second.load(1, slot, places);
      const uint32_t present = present_of(turn / STAGE_TURNS);
      store_unit(2, to, third, places);
      if (in_stage + 1 == STAGE_TURNS) empty = next_is_empty();
      store_unit(3, to, fourth, places);
      if (in_stage + 1 == STAGE_TURNS) complete(present);
    }
  }

  // Whether the stage after this one was seen to be empty.
  MLA_DEVICE bool next_is_empty() const {
    Ring<Policy::STAGES> following = ring_;
    following.next();
    return barrier_test(this->barriers_.kv_empty(following.stage), following.parity ^ 1);
  }

  MLA_DEVICE Places places_now() const { return Places(lane_anew(), first_key(), notes()); }

  // Where the keys of the turn after the one in `slot` lie as they came.
  MLA_DEVICE uint32_t slot_after(uint32_t slot) const {
    const uint32_t after = slot + Policy::SLOT_BYTES;
    return after == raw_ + Policy::RAW_BYTES ? raw_ : after;
  }

  // Dequantises a unit to where it is multiplied.
  MLA_DEVICE static void store_unit(uint32_t number, uint32_t to, const Unit& unit, const Places& places) {
    uint32_t values[8];
    unit.dequantised(values);
    const uint32_t place = to ^ number / 2 * Places::on(2);
    const uint32_t more = number % 2 * (4 * Policy::BLOCK_BYTES);
    const bool any = number % 2 == 0 || places.has_last();
    store16(any, place + more, values[0], values[1], values[2], values[3]);
    store16(any, (place ^ 16) + more, values[4], values[5], values[6], values[7]);
  }

  // Where a lane's two keys of a turn lie.
  struct Tokens {
    uint64_t rows[2];  // addresses, or 0
    int to_scales[2];  // from there to the scales, where they lie apart
  };

  // Of a turn of the batch that was looked up last.
  MLA_DEVICE static Tokens tokens_of(uint32_t turn, const Places& places) {
    Tokens tokens{{0, 0}, {0, 0}};
    asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
                 : "=l"(tokens.rows[0]), "=l"(tokens.rows[1])
                 : "r"(places.token + turn * 32)
                 : "memory");
    if constexpr (Record::SCALES_APART)
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(tokens.to_scales[0]), "=r"(tokens.to_scales[1])
                   : "r"(places.scales + turn * 16)
                   : "memory");
    return tokens;
  }

  // Begins to copy a turn's keys, 16 lanes a key, to `slot`. There is a group for it even when no such turn is left:
  // groups are counted.
  MLA_DEVICE static void issue(bool any, const Tokens& tokens, uint32_t slot, const Places& places) {
    const uint32_t part = places.copied % 1024;
    const uint32_t to = slot + places.copied;
    const uint32_t tail = slot + Policy::TAILS + places.copied / 1024 * (2 * Record::TAIL) + part;
    const bool in_tail = part < Record::TAIL_PIECES * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool present = tokens.rows[i] != 0;
      const uint64_t from = tokens.rows[i] + part;
      copy_present<16>(any, to + i * 512, from, present);
      copy_present<16>(any, to + i * 512 + 256, from + 256, present);
      copy_present<16>(any && in_tail, tail + i * Record::TAIL, from + 512, present);
      if constexpr (Record::SCALES_APART)
        copy_present<8>(any && part == 0, tail + i * Record::TAIL + Record::TAIL_SCALES,
                        tokens.rows[i] + tokens.to_scales[i], present);
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
            this->shared_ + filled.stage * Policy::STAGE_BYTES + (warp_ * Policy::WARP_KEYS + slot) * 128;
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
  const uint32_t warp_;         // the loader's are a block's first. Like the next, the same for all lanes, and told so:
  const uint32_t warp_of_all_;  // its number among those that bring as many keys of a stage each: of both blocks
  const uint32_t raw_;
  const uint32_t to_peer_;  // from an address of this block to the other's
  Ring<Policy::STAGES> ring_;
};

}  // namespace mla::sm90
