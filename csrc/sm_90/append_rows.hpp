// append_kv of many tokens to a workgroup, where rows are as append_row.hpp has them: nothing is looked up before
// memory is busy.
//
// A workgroup of 32 warps, one on an SM, has up to 512 neighbouring tokens, a warp every 32nd of them. It knows at once
// which of its own tokens have the same slot, and writes only the last of these; whether a token of a later workgroup
// has the slot it looks up beside the rows, some slots after each. A row that should not have been written is put right
// at the end: the lanes that wrote it write the row of the last token with that slot over it. So whatever the order,
// what a workgroup writes last to a slot is the right row.
#pragma once

#include "sm_90/append_row.hpp"

namespace sm_90 {

struct AppendRows {
  using Params = mla::AppendKvParams;
  using Any = mla::AppendKv<Wave, 512>;
  static constexpr int waves = 32, threads = 1024, most_tokens = 512;
  static constexpr int marks = 2048;   // words of the filter, a bit for each of as many slots
  static constexpr int places = 1024;  // of the table, twice the tokens
  static constexpr int ahead = 4;      // slots that a lane looks at after a row

  // The slots of a workgroup's tokens, each once, at or behind the place its hash says; and the last token with it.
  struct Table {
    int filter[marks];
    int slots[places];  // or -1
    int last[places];
  };

  MLA_DEVICE static void run(const Params& p) {
    MLA_SHARED Table table;
    Wave::wait_for_producer();
    Wave::release_consumer();
    const int thread = mla::thread_id(), lane = thread % 32;
    const int wave = Wave::uniform(thread / 32);
    const int first = mla::block_id_x() * p.group;
    const int count = p.tokens - first < p.group ? p.tokens - first : p.group;
    const int end = first + count;

    // Lane i has what is known of the warp's i-th token.
    const int token = first + wave + waves * lane;
    const bool exists = lane < most_tokens / waves && token < end;
    RawIndex own, where;
    if (exists) own.load(p.slot_mapping, p.wide_slots, token);
    if (exists && p.cos_sin != nullptr) where.load(p.positions, p.wide_positions, token);
    AppendRow even, odd;
    RowPlaces from = AppendRow::inputs(p, first + wave);
    if (wave < count) even.load(p, from, lane);
    step(p, from);
    if (wave + waves < count) odd.load(p, from, lane);
    Later later;
    later.token = p.tokens - 1 - thread;
    later.at = static_cast<const uint8_t*>(p.slot_mapping) + (static_cast<int64_t>(later.token) << (2 + p.wide_slots));
    load_later(p, end, later);

    for (int i = thread; i < marks; i += threads) table.filter[i] = 0;
    table.slots[thread] = -1;
    table.last[thread] = 0;
    mla::block_sync();
    int slot = own.slot(p), place = 0;
    const int position = static_cast<int>(where.low);
    if (slot >= 0) place = insert(table, slot, token);
    mla::block_sync();
    if (slot >= 0 && table.last[place] != token) slot = -1;

    const int own_slot = slot;
    int next = Wave::from_lane(own_slot, 0);
    if (next >= 0) even.load_angle(p, Wave::from_lane(position, 0), lane);
    next = Wave::from_lane(own_slot, 1);
    if (next >= 0) odd.load_angle(p, Wave::from_lane(position, 1), lane);
#pragma unroll 1
    for (int i = 0; wave + waves * i < count; i += 2) {
      write(p, even, from, count - wave, i, own_slot, position, lane);
      look(p, table, end, later);
      write(p, odd, from, count - wave, i + 1, own_slot, position, lane);
      look(p, table, end, later);
    }
    while (Wave::any(later.token >= end)) look(p, table, end, later);
    mla::block_sync();

    const int last = slot >= 0 ? table.last[place] : token;
    for (unsigned wrong = __ballot_sync(~0u, last != token); wrong != 0; wrong &= wrong - 1) {
      const int i = __ffs(wrong) - 1;
      const int right = Wave::from_lane(last, i);
      even.load(p, AppendRow::inputs(p, right), lane);
      if (p.cos_sin != nullptr) where.load(p.positions, p.wide_positions, right);
      even.load_angle(p, where.low, lane);
      even.store(p, Wave::from_lane(slot, i), lane);
    }
  }

  // To the warp's next row.
  MLA_DEVICE static void step(const Params& p, RowPlaces& from) {
    from.latent += waves * 2 * p.kv_c_stride;
    from.rope += waves * 2 * p.k_pe_stride;
  }

  // Writes the warp's i-th row and asks for the one that takes its place.
  MLA_DEVICE static void write(const Params& p, AppendRow& row, RowPlaces& from, int count, int i, int slots,
                               int positions, int lane) {
    const int slot = Wave::from_lane(slots, i);
    if (slot >= 0) row.store(p, slot, lane);
    step(p, from);
    if (waves * (i + 2) < count) row.load(p, from, lane);
    if (Wave::from_lane(slots, i + 2) >= 0) row.load_angle(p, Wave::from_lane(positions, i + 2), lane);
  }

  // The place of a slot in the table, whose last token this may be.
  MLA_DEVICE static int insert(Table& table, int slot, int token) {
    int place = place_of(slot);
    for (;;) {
      const int there = atomicCAS(&table.slots[place], -1, slot);
      if (there == -1 || there == slot) break;
      place = (place + 1) % places;
    }
    atomicMax(&table.last[place], token);
    Wave::set_bits(&table.filter[slot / 32 % marks], 1 << slot % 32);
    return place;
  }

  MLA_DEVICE static int place_of(int slot) { return static_cast<uint32_t>(slot) * 0x9e3779b1u >> 22; }

  // Low words of the slots of a lane's next tokens, from the last on downwards.
  struct Later {
    int token;
    const uint8_t* at;
    uint32_t slots[ahead];
  };

  MLA_DEVICE static void load_later(const Params& p, int end, Later& later) {
    for (int i = 0; i < ahead; ++i) {
      later.slots[i] = ~0u;
      if (later.token - i * threads >= end)
        later.slots[i] = *reinterpret_cast<const uint32_t*>(later.at - (i * threads * 4ll << p.wide_slots));
    }
  }

  // Looks at these and asks for the next. From the last on: of many tokens with a slot the first to be met is the last.
  MLA_DEVICE static void look(const Params& p, Table& table, int end, Later& later) {
    uint32_t slots[ahead];
    int found = 0;
    for (int i = 0; i < ahead; ++i) {
      slots[i] = later.slots[i];
      const uint32_t mark = static_cast<uint32_t>(table.filter[slots[i] / 32 % marks]) >> slots[i] % 32 & 1;
      found |= static_cast<int>(mark) << i;
    }
    const int token = later.token;
    later.token -= ahead * threads;
    later.at -= ahead * threads * 4ll << p.wide_slots;
    load_later(p, end, later);
    if (found == 0) return;
#pragma unroll
    for (int i = 0; i < ahead; ++i)
      if ((found >> i & 1) != 0) note(p, table, slots[i], token - i * threads);
  }

  // If the workgroup has a token with this slot, it is not the last.
  MLA_DEVICE static void note(const Params& p, Table& table, uint32_t low, int other) {
    int place = place_of(static_cast<int>(low));
    for (;; place = (place + 1) % places) {
      const int there = table.slots[place];
      if (there == -1) return;
      if (there == static_cast<int>(low)) break;
    }
    if (table.last[place] < other && Any::slot_of(p, other) == static_cast<int>(low))
      atomicMax(&table.last[place], other);
  }
};

}  // namespace sm_90
