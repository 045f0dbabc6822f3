// Which of a workgroup's tokens is the last with its slot, and whether a token of a later workgroup has it: a table of
// the workgroup's slots, and a look at all later ones.
#pragma once

#include "sm_90/append_row.hpp"

namespace sm_90 {

// The slots of a workgroup's tokens, each once, at or behind the place its hash says; and the last token with it.
struct LastTokens {
  static constexpr int marks = 2048;   // words of the filter, a bit for each of as many slots
  static constexpr int places = 1024;  // twice the tokens, and as many as the threads

  int filter[marks];
  int slots[places];  // or -1
  int last[places];

  MLA_DEVICE void clear(int thread) {
    for (int i = 0; i < marks; i += places) filter[i + thread] = 0;
    slots[thread] = -1;
    last[thread] = 0;
  }

  // By all threads, with a token or without: the place of a token's slot if it is the last of the workgroup's with it,
  // else -1. By then the look may have met a later token, which will be written in its stead: -1 is right, too.
  MLA_DEVICE int enter(int slot, int token) {
    const int place = slot >= 0 ? insert(slot, token) : -1;
    mla::block_sync();
    return place >= 0 && last[place] == token ? place : -1;
  }

  // In the last bit whether a slot with these low bits may be here; whatever else in the others.
  MLA_DEVICE uint32_t mark(uint32_t slot) const {
    return __funnelshift_r(filter[slot / 32 % marks], 0, slot);  // by slot % 32
  }

  // Whether a slot of the workgroup has these low bits, and where.
  MLA_DEVICE bool find(uint32_t low, int& place) const {
    for (place = place_of(static_cast<int>(low));; place = (place + 1) & (places - 1)) {
      if (slots[place] == static_cast<int>(low)) return low != ~0u;
      if (slots[place] == -1) return false;
    }
  }

 private:
  MLA_DEVICE int insert(int slot, int token) {
    int place = place_of(slot);
    for (;;) {
      const int there = atomicCAS(&slots[place], -1, slot);
      if (there == -1 || there == slot) break;
      place = (place + 1) & (places - 1);
    }
    atomicMax(&last[place], token);
    Wave::set_bits(&filter[slot / 32 % marks], 1 << slot % 32);
    return place;
  }

  MLA_DEVICE static int place_of(int slot) { return static_cast<uint32_t>(slot) * 0x9e3779b1u >> 22; }
};

// A lane's part of the slots behind the workgroup's, read from the last on downwards: of many tokens with a slot the
// first to be met is the last. Slots are read in the whole 16 bytes that they lie in; two of these are under way.
struct LaterSlots {
  using Any = mla::AppendKv<Wave, 1>;
  using Params = mla::AppendKvParams;
  using Octet = mla::Vec<uint32_t, 4>;
  static constexpr int threads = 1024, ahead = 2;

  uint64_t at;  // the address of the last of those under way
  int left;     // how many there are up to it
  Octet slots[ahead];

  // `end`: the first token that may be looked at, the fourth or a later one, so that all of its 16 bytes are there.
  MLA_DEVICE LaterSlots(const Params& p, int end, int thread) {
    const int whole = octets(p, p.tokens);
    left = whole - octets(p, end) - thread;
    at = (reinterpret_cast<uint64_t>(p.slot_mapping) & ~15ull) + (whole - 1 - thread) * 16ll;
    for (int i = 0; i < ahead; ++i) slots[i] = Octet{{~0u, ~0u, ~0u, ~0u}};
    load();
  }

  // Those behind the last whole 16 bytes.
  MLA_DEVICE static void look_at_rest(const Params& p, LastTokens& table, int end, int thread) {
    const int token = p.tokens - 1 - thread;
    if (token < end || octets(p, token) < octets(p, p.tokens)) return;
    note(p, table, RawIndex::at(p.slot_mapping, p.wide_slots, token).low, token);
  }

  // Looks at these and asks for the next.
  MLA_DEVICE void look(const Params& p, LastTokens& table, int end) {
    uint32_t any = 0;
    for (int i = 0; i < ahead; ++i) any |= table.mark(slots[i][0]) | table.mark(slots[i][2]);
    if (p.wide_slots == 0) {
      for (int i = 0; i < ahead; ++i) {
        asm volatile("" : "+r"(slots[i][1]), "+r"(slots[i][3]));  // nothing of this is done where slots are wide
        any |= table.mark(slots[i][1]) | table.mark(slots[i][3]);
      }
    }
    if ((any & 1) != 0) note_marked(p, table, end);
    at -= ahead * threads * 16;
    left -= ahead * threads;
    load();
  }

 private:
  MLA_DEVICE void load() {
    for (int i = 0; i < ahead; ++i)
      if (left > i * threads)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"  // volatile: it stays before what waits for a slot
                     : "=r"(slots[i][0]), "=r"(slots[i][1]), "=r"(slots[i][2]), "=r"(slots[i][3])
                     : "l"(at - i * threads * 16));
  }

  // By tokens, of which not all need be there: where nothing was left to load, slots are of the turn before.
  MLA_DEVICE void note_marked(const Params& p, LastTokens& table, int end) const {
    uint32_t found = 0;
    for (int i = 0; i < 4 * ahead; ++i)
      if (i % 2 == 0 || p.wide_slots == 0) found |= (table.mark(slots[i / 4][i % 4]) & 1) << i;
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
      if (token >= end) note(p, table, low, token);
    }
  }

  // If the workgroup has a token with this slot, it is not the last.
  MLA_DEVICE static void note(const Params& p, LastTokens& table, uint32_t low, int token) {
    int place;
    if (!table.find(low, place) || table.last[place] >= token) return;
    if (Any::slot_of(p, token) == static_cast<int>(low)) atomicMax(&table.last[place], token);
  }

  // How many 16 bytes lie before those with this token's slot, from those with the first token's on.
  MLA_DEVICE static int octets(const Params& p, int token) {
    const int before = static_cast<int>(reinterpret_cast<uint64_t>(p.slot_mapping) & 15) >> (2 + p.wide_slots);
    return (token + before) >> (2 - p.wide_slots);
  }
};

}  // namespace sm_90
