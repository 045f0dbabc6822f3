// Duplicate slots: which of a block's tokens is the last with its slot, and whether a token of a later block has the
// same slot. A hash table holds the block's slots, and a scan reads all later ones.
#pragma once

#include "sm_90/append_kv/row.hpp"

namespace mla::sm_90 {

// The slots of a block's tokens, each once, at or behind the position that its hash says, with the last token of each.
struct LastWriters {
  static constexpr int filter_words = 2048;  // each bit stands for all slots with the same low bits
  static constexpr int positions = 1024;  // twice the tokens, and as many as the threads

  int filter[filter_words];
  int slots[positions];  // or -1
  int last[positions];

  MLA_DEVICE void clear(int thread) {
    for (int i = 0; i < filter_words; i += positions) filter[i + thread] = 0;
    slots[thread] = -1;
    last[thread] = 0;
  }

  // Enters a token's slot. Returns its position if the token is the block's last with this slot, else -1. The scan may
  // already have found a later token, which will be written instead; then -1 is right, too. Called by all threads, with
  // a token or without.
  MLA_DEVICE int enter(int slot, int token) {
    const int position = slot >= 0 ? insert(slot, token) : -1;
    mla::block_sync();
    return position >= 0 && last[position] == token ? position : -1;
  }

  // Bit 0: whether a slot with these low bits may be in the table. The other bits are arbitrary.
  MLA_DEVICE uint32_t may_hold(uint32_t slot) const {
    return __funnelshift_r(filter[slot / 32 % filter_words], 0, slot);  // by slot % 32
  }

  // Whether a slot of the block has these low bits, and at which position.
  MLA_DEVICE bool find(uint32_t low, int& position) const {
    for (position = position_of(static_cast<int>(low));; position = (position + 1) & (positions - 1)) {
      if (slots[position] == static_cast<int>(low)) return low != ~0u;
      if (slots[position] == -1) return false;
    }
  }

 private:
  MLA_DEVICE int insert(int slot, int token) {
    int position = position_of(slot);
    for (;;) {
      const int there = atomicCAS(&slots[position], -1, slot);
      if (there == -1 || there == slot) break;
      position = (position + 1) & (positions - 1);
    }
    atomicMax(&last[position], token);
    Wave::set_bits(&filter[slot / 32 % filter_words], 1 << slot % 32);
    return position;
  }

  // The top 10 bits of the slot times 2^32 / the golden ratio, which spreads neighbouring slots.
  static_assert(positions == 1 << (32 - 22));
  MLA_DEVICE static int position_of(int slot) { return static_cast<uint32_t>(slot) * 0x9e3779b1u >> 22; }
};

// A thread's part of the slots behind the block's, read from the last downwards, so that of many tokens with a slot the
// last is found first. Slots are read in the aligned 16 bytes that hold them; two such loads are in flight.
struct LaterDuplicateScan {
  using Any = mla::AppendKv<Wave, 1>;
  using Params = mla::AppendKvParams;
  using Octet = mla::Vec<uint32_t, 4>;
  static constexpr int threads = 1024, ahead = 2;

  uint64_t at;  // the address of the highest load in flight
  int left;     // loads left, this one included
  Octet slots[ahead];

  // `end` is the first token of later blocks; it is at least the fourth, so that all of its 16 bytes exist.
  MLA_DEVICE LaterDuplicateScan(const Params& p, int end, int thread) {
    const int whole = octet_of(p, p.tokens);
    left = whole - octet_of(p, end) - thread;
    at = (reinterpret_cast<uint64_t>(p.slot_mapping) & ~15ull) + (whole - 1 - thread) * 16ll;
    for (int i = 0; i < ahead; ++i) slots[i] = Octet{{~0u, ~0u, ~0u, ~0u}};
    load();
  }

  // Scans the slots behind the last aligned 16 bytes.
  MLA_DEVICE static void scan_rest(const Params& p, LastWriters& table, int end, int thread) {
    const int token = p.tokens - 1 - thread;
    if (token < end || octet_of(p, token) < octet_of(p, p.tokens)) return;
    record(p, table, RawIndex::at(p.slot_mapping, p.wide_slots, token).low, token);
  }

  // Checks the loaded slots and issues the next loads.
  MLA_DEVICE void scan(const Params& p, LastWriters& table, int end) {
    uint32_t any = 0;
    for (int i = 0; i < ahead; ++i) any |= table.may_hold(slots[i][0]) | table.may_hold(slots[i][2]);
    if (p.wide_slots == 0) {
      for (int i = 0; i < ahead; ++i) {
        pin_registers(slots[i][1], slots[i][3]);  // or part of this is done for 64-bit slots, too
        any |= table.may_hold(slots[i][1]) | table.may_hold(slots[i][3]);
      }
    }
    if ((any & 1) != 0) record_marked(p, table, end);
    at -= ahead * threads * 16;
    left -= ahead * threads;
    load();
  }

 private:
  MLA_DEVICE void load() {
    for (int i = 0; i < ahead; ++i)
      if (left > i * threads)  // the load stays in front of a wait for a slot
        ld_global_v4(reinterpret_cast<const void*>(at - i * threads * 16), slots[i].data);
  }

  // Records the marked slots by their tokens. Where nothing was left to load, slots are those of the turn before, whose
  // tokens are past the range.
  MLA_DEVICE void record_marked(const Params& p, LastWriters& table, int end) const {
    uint32_t found = 0;
    for (int i = 0; i < 4 * ahead; ++i)
      if (i % 2 == 0 || p.wide_slots == 0) found |= (table.may_hold(slots[i / 4][i % 4]) & 1) << i;
    const int64_t words = static_cast<int64_t>(at - reinterpret_cast<uint64_t>(p.slot_mapping)) >> 2;
#pragma unroll 1
    for (; found != 0; found &= found - 1) {
      const int which = __ffs(found) - 1;
      uint32_t low = 0;
#pragma unroll
      for (int i = 0; i < 4 * ahead; ++i)
        if (i == which) low = slots[i / 4][i % 4];
      const int word = which % 4 - which / 4 * threads * 4;
      const int token = static_cast<int>((words + word) >> p.wide_slots);
      if (token >= end) record(p, table, low, token);
    }
  }

  // If the block has a token with this slot, `token` becomes the last one.
  MLA_DEVICE static void record(const Params& p, LastWriters& table, uint32_t low, int token) {
    int position;
    if (!table.find(low, position) || table.last[position] >= token) return;
    if (Any::slot_of(p, token) == static_cast<int>(low)) atomicMax(&table.last[position], token);
  }

  // The number of the aligned 16 bytes that hold this token's slot, counted from those of the first token.
  MLA_DEVICE static int octet_of(const Params& p, int token) {
    const int before = static_cast<int>(reinterpret_cast<uint64_t>(p.slot_mapping) & 15) >> (2 + p.wide_slots);
    return (token + before) >> (2 - p.wide_slots);
  }
};

}  // namespace mla::sm_90
