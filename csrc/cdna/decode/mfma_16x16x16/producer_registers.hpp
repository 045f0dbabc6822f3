// The producer of the key-split mainloop: one wave's keys come from memory straight into matrix operands.
//
// The mainloop consumes the registers load by load, and each is refilled with the next tile's bytes as soon as it is
// free. The page numbers of the tile after the next are in flight meanwhile.
#pragma once

#include "cdna/common/rope.hpp"
#include "cdna/common/types.hpp"
#include "common/paged_kv.hpp"
#include "common/problem.hpp"
#include "common/work_tile.hpp"

namespace cdna::mfma_16x16x16 {

// One tile of keys as a lane holds it.
template <class Problem>
struct KvRegisters {
  static constexpr int loads = Problem::row_bytes / 64;  // 16-byte loads of a lane per tile
  u32x4 key[loads];   // bytes 64 n + 16 * lane.group + 0..15 of the row of key lane.column
  ChunkRope cos_sin;  // for the rope part of `key`
};

template <class Problem, class Policy>
class RegisterProducer {
 public:
  static constexpr int lds_bytes = 0;
  static constexpr int tile_keys = 16;
  static constexpr int step = Policy::waves * tile_keys;  // keys from one tile of a wave to its next

  MLA_DEVICE RegisterProducer(const mla::PagedKv& paged_kv, const mla::WorkTile& tile, const Lane& lane,
                              KvRegisters<Problem>& registers)
      : paged_kv_(paged_kv), tile_(tile), lane_(lane), registers_(registers) {}

  // Loads the wave's first tile, which begins at key `first`.
  MLA_DEVICE void start(const mla::DecodeParams& p, int first) {
    next_key_ = key_at(first);
    const char* row = row_of(paged_kv_.page_of(next_key_), next_key_);
#pragma unroll
    for (int n = 0; n < KvRegisters<Problem>::loads; ++n) {
      registers_.key[n] = *reinterpret_cast<const u32x4*>(row + n * 64);
    }
    load_cos_sin(p, next_key_);
    next_key_ = key_at(first + step);
    next_page_ = paged_kv_.page_of(next_key_);
  }

  // Finds the row that `refill` loads from, the one after the tile at `first`, and begins to read the page number
  // behind it.
  MLA_DEVICE void advance(int first) {
    refill_row_ = row_of(next_page_, next_key_);
    refill_key_ = next_key_;
    next_key_ = key_at(first + 2 * step);
    next_page_ = paged_kv_.page_of(next_key_);
  }
  // Loads the next tile's bytes into register n, which must be free.
  MLA_DEVICE void refill(int n) { registers_.key[n] = *reinterpret_cast<const u32x4*>(refill_row_ + n * 64); }
  // Loads the next tile's cosines and sines; those of the present one must have been used.
  MLA_DEVICE void refill_cos_sin(const mla::DecodeParams& p) { load_cos_sin(p, refill_key_); }

 private:
  // Returns the lane's key of the tile that begins at `first`; past the work tile's end its last key, masked later.
  MLA_DEVICE uint32_t key_at(int first) const {
    const int key = first + lane_.column;
    return static_cast<uint32_t>(key < tile_.end_key ? key : tile_.end_key - 1);
  }
  MLA_DEVICE const char* row_of(uint32_t page, uint32_t key) const {
    return paged_kv_.row(page, key) + lane_.group * 16;
  }
  MLA_DEVICE void load_cos_sin(const mla::DecodeParams& p, uint32_t key) {
    if constexpr (Problem::rotate) {
      registers_.cos_sin =
          ChunkRope::load(p.rope_cos_sin + static_cast<int64_t>(key) * COS_SIN_FLOATS + lane_.group * 8);
    }
  }

  const mla::PagedKv& paged_kv_;
  const mla::WorkTile& tile_;
  const Lane& lane_;
  KvRegisters<Problem>& registers_;
  uint32_t next_key_;
  uint32_t next_page_;
  const char* refill_row_;
  uint32_t refill_key_;
};

}  // namespace cdna::mfma_16x16x16
