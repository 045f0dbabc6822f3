// The top-k lists of one query token as a table in LDS: where each pool's list of indices begins and ends, and how its
// cache is paged.
//
// A lane looks up its key's pool there. In registers the lists of four pools would cost more than the mainloop has
// left.
#pragma once

#include "cdna/common/cross_lane.hpp"
#include "cdna/common/lds.hpp"
#include "cdna/common/swizzled_lds_tile.hpp"
#include "common/division.hpp"
#include "common/selection.hpp"

namespace cdna::sparse {

// The token that an index names: where its page begins, and its number in the page.
struct SelectedToken {
  uint64_t page_at;  // address
  uint32_t in_page;
  uint32_t page;  // tokens of the page
  bool valid;     // the index lies in the pool
  bool fp4;       // of V4.1's tokens: those of 288 bytes
};

class TopkLists {
  // Bytes of a pool's entry.
  static constexpr int list = 0;  // address of the token's first index, less the keys of the pools before
  static constexpr int cache = 8;
  static constexpr int page_bytes = 16;
  static constexpr int slots = 24;
  static constexpr int page = 28;
  static constexpr int page_reciprocal = 32;
  static constexpr int page_shift = 36;
  static constexpr int end = 40;  // keys up to and including the pool's
  static constexpr int fp4 = 44;  // bit 0 of this word shifted right by the pool's number
  static constexpr int entry_bytes = 48;

 public:
  static constexpr int lds_bytes = mla::MAX_POOLS * entry_bytes;

  // Fills the table; called by one wave, a pool to a lane. A barrier must follow. `fp4_pools` has a bit for each pool.
  MLA_DEVICE static void fill(const mla::SparseDecodeParams& p, int token, uint32_t lds, uint32_t fp4_pools) {
    const int lane = Lane::current().index;
    if (lane >= mla::MAX_POOLS) return;
    const mla::Pool pool = p.pool[lane];
    const mla::PoolList found = lane < p.pools ? mla::PoolList::of(pool, token) : mla::PoolList{nullptr, 0};
    int before = 0;
#pragma unroll
    for (int i = 0; i + 1 < mla::MAX_POOLS; ++i) {
      const int count = static_cast<int>(broadcast(static_cast<uint32_t>(found.count), i));
      before += lane > i ? count : 0;
    }
    const LdsBytes at = lds_pointer(lds + lane * entry_bytes);
    lds_write16(at + list,
                u32x4_of(reinterpret_cast<uint64_t>(found.first - before), reinterpret_cast<uint64_t>(pool.cache)));
    lds_write16(at + page_bytes, u32x4_of(static_cast<uint64_t>(pool.page_bytes),
                                          static_cast<uint64_t>(static_cast<uint32_t>(pool.page)) << 32 |
                                              static_cast<uint32_t>(pool.slots)));
    lds_write16(at + page_reciprocal,
                u32x4{pool.page_reciprocal, pool.page_shift, static_cast<uint32_t>(before + found.count), fp4_pools});
  }

  MLA_DEVICE explicit TopkLists(uint32_t lds) : lds_(lds) {}

  // Returns the number of keys of all pools, the same in all lanes.
  MLA_DEVICE int keys() const { return uniform(static_cast<int>(word(mla::MAX_POOLS - 1, end))); }

  // Returns the index of a key; `key` must be below keys().
  MLA_DEVICE int index_of(int key) const {
    const u32x2 at = lds_read8(lds_pointer(lds_ + pool_of(key) * entry_bytes + list));
    return *reinterpret_cast<const __attribute__((address_space(1))) int*>(join(at) +
                                                                           key * static_cast<int64_t>(sizeof(int32_t)));
  }

  // Returns the token that `index` names in the pool of `key`.
  MLA_DEVICE SelectedToken token_of(int key, int index) const {
    const int pool = pool_of(key);
    const uint32_t entry = lds_ + pool * entry_bytes;
    const u32x2 cache_at = lds_read8(lds_pointer(entry + cache));
    const u32x4 paged = lds_read16(lds_pointer(entry + page_bytes));
    const u32x2 division = lds_read8(lds_pointer(entry + page_reciprocal));
    const uint32_t low = paged[0], high = paged[1], number_of_slots = paged[2], tokens = paged[3];
    const uint32_t reciprocal = division[0], shift = division[1];
    const uint32_t slot = static_cast<uint32_t>(index);
    const uint32_t number = mla::divided(slot, reciprocal, shift);
    return SelectedToken{join(cache_at) + number * (static_cast<uint64_t>(high) << 32 | low), slot - number * tokens,
                         tokens, slot < number_of_slots, (word(pool, fp4) >> pool & 1) != 0};
  }

 private:
  MLA_DEVICE uint32_t word(int pool, int field) const {
    return lds_read_word(lds_pointer(lds_ + pool * entry_bytes + field));
  }
  MLA_DEVICE int pool_of(int key) const {
    int pool = 0;
#pragma unroll
    for (int i = 0; i + 1 < mla::MAX_POOLS; ++i) pool += key >= static_cast<int>(word(i, end)) ? 1 : 0;
    return pool;
  }
  MLA_DEVICE static u32x4 u32x4_of(uint64_t first, uint64_t second) {
    return u32x4{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second),
                 static_cast<uint32_t>(second >> 32)};
  }
  MLA_DEVICE static uint64_t join(u32x2 words) {
    const uint32_t low = words[0], high = words[1];
    return static_cast<uint64_t>(high) << 32 | low;
  }

  uint32_t lds_;
};

}  // namespace cdna::sparse
