// Where the rows that one wave copies lie in the paged cache.
#pragma once

#include "cdna/common/cross_lane.hpp"
#include "cdna/common/lds.hpp"
#include "cdna/common/lds_copy.hpp"
#include "common/paged_kv.hpp"

namespace cdna::mfma_16x16x16 {

// Row addresses of the keys that one wave copies, found for a block of tiles at a time: lane l knows key l % `keys` (of
// the wave's) of tile l / `keys`. Page numbers come through LDS, one block ahead. The address of row j of four is
// lowered by pitch * j, as the copies of lds_copy.hpp expect.
template <int pitch, int keys, int waves>
class KvRowAddresses {
 public:
  static constexpr int block_tiles = WAVE / keys;
  static constexpr int bytes = 2 * WAVE * 4;  // page numbers of two blocks, of a wave

  MLA_DEVICE KvRowAddresses(const mla::PagedKv& paged_kv, int first_key, int end_key, const Lane& lane, int wave,
                            LdsBytes lds)
      : paged_kv_(paged_kv),
        first_key_(first_key + keys * wave),
        last_key_(end_key - 1),
        lane_(lane.index),
        lds_(lds) {}

  // Makes the addresses of a tile known, of `tiles` in all; called for each tile in order.
  MLA_DEVICE void advance(int tile, int tiles) {
    if (__builtin_expect(tile % block_tiles == 0, false)) {
      const int block = tile / block_tiles;
      enter(block);
      if (tile + block_tiles < tiles) fetch(block + 1);
    }
  }

  // Begins to read the page numbers of a block.
  MLA_DEVICE void fetch(int block) const {
    const int lane = rematerialized(lane_);
    copy_words_to_lds(paged_kv_.page_entry(key(block, lane)),
                      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds_)) + slot(block));
  }

  // Turns the page numbers of a block, which must have arrived, into addresses.
  MLA_DEVICE void enter(int block) {
    const int lane = rematerialized(lane_);
    const uint32_t page = *reinterpret_cast<MLA_LDS uint32_t*>(lds_ + slot(block) + lane * 4);
    row_ = paged_kv_.row(page, key(block, lane)) - lane % 4 * pitch;
  }

  // Returns row j of the wave in a tile of the entered block, the same in all lanes.
  MLA_DEVICE const char* uniform(int tile, int j) const { return broadcast(row_, tile % block_tiles * keys + j); }
  // Returns the row of the wave's key number `first` + lane.group.
  MLA_DEVICE const char* of_group(int tile, int first, const Lane& lane) const {
    return shuffle(row_, tile % block_tiles * keys + first + lane.group);
  }

  MLA_DEVICE int key_of_group(int tile, const Lane& lane) const {
    const int key = first_key_ + tile * keys * waves + lane.group;
    return key < last_key_ ? key : last_key_;
  }

 private:
  MLA_DEVICE static int slot(int block) { return block % 2 * WAVE * 4; }
  MLA_DEVICE uint32_t key(int block, int lane) const {
    const int key = first_key_ + (block * block_tiles + lane / keys) * keys * waves + lane % keys;
    return static_cast<uint32_t>(key < last_key_ ? key : last_key_);
  }

  const mla::PagedKv& paged_kv_;
  int first_key_;  // the wave's first key of the work tile
  int last_key_;   // of the work tile
  int lane_;
  const char* row_;
  LdsBytes lds_;
};

}  // namespace cdna::mfma_16x16x16
