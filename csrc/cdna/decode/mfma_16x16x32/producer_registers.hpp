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

namespace cdna::mfma_16x16x32 {

// One tile of keys as a lane holds it.
template <class Problem, int keys>
struct KvRegisters {
  static constexpr int score_tiles = keys / 16;
  static constexpr int loads = Problem::row_bytes / 64;  // 16-byte loads of a lane per 16 keys

  u32x4 key[score_tiles][loads];   // bytes 64 n + 16 * lane.group + 0..15 of the row of key 16 T + lane.column
  ChunkRope cos_sin[score_tiles];  // for the rope parts of `key`
};

template <class Problem, class Policy, int keys>
class RegisterProducer {
  using Registers = KvRegisters<Problem, keys>;
  static constexpr int score_tiles = Registers::score_tiles;

 public:
  static constexpr int lds_bytes = 0;
  static constexpr int step = Policy::waves * keys;  // keys from one tile of a wave to its next

  MLA_DEVICE RegisterProducer(const mla::PagedKv& paged_kv, const mla::WorkTile& tile, const Lane& lane,
                              Registers& registers)
      : paged_kv_(paged_kv), tile_(tile), lane_(lane), registers_(registers) {}

  // Begins to read the page numbers of the wave's first tile, which begins at key `first`.
  MLA_DEVICE void begin(int first) { find_pages(first); }

  // Loads that tile.
  MLA_DEVICE void start(const mla::DecodeParams& p, int first) {
    const Rows rows = rows_of(first);
#pragma unroll
    for (int T = 0; T < score_tiles; ++T)
#pragma unroll
      for (int n = 0; n < Registers::loads; ++n)
        registers_.key[T][n] = *reinterpret_cast<const u32x4*>(rows.of[T] + n * 64);
    load_cos_sin(p, first);
    find_pages(first + step);
  }

  // Finds the rows that `refill` loads from, those after the tile at `first`, and begins to read the page numbers
  // behind.
  MLA_DEVICE void advance(int first) {
    refill_ = rows_of(first + step);
    find_pages(first + 2 * step);
  }
  // Loads the next tile's bytes into register n of score tile T, which must be free.
  MLA_DEVICE void refill(int T, int n) {
    registers_.key[T][n] = *reinterpret_cast<const u32x4*>(refill_.of[T] + n * 64);
  }
  // Loads the cosines and sines of the tile after the one at `first`, whose own must have been used.
  MLA_DEVICE void refill_cos_sin(const mla::DecodeParams& p, int first) { load_cos_sin(p, first + step); }

 private:
  struct Rows {
    const char* of[score_tiles];
  };

  // Returns the lane's key of score tile T of the tile at `first`; past the work tile's end its last key, masked later.
  MLA_DEVICE uint32_t key_at(int first, int T) const {
    const int key = first + 16 * T + lane_.column;
    return static_cast<uint32_t>(key < tile_.end_key ? key : tile_.end_key - 1);
  }
  MLA_DEVICE void find_pages(int first) {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) page_[T] = paged_kv_.page_of(key_at(first, T));
  }
  MLA_DEVICE Rows rows_of(int first) const {
    Rows rows;
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) rows.of[T] = paged_kv_.row(page_[T], key_at(first, T)) + lane_.group * 16;
    return rows;
  }
  MLA_DEVICE void load_cos_sin(const mla::DecodeParams& p, int first) {
    if constexpr (Problem::rotate) {
#pragma unroll
      for (int T = 0; T < score_tiles; ++T) {
        registers_.cos_sin[T] =
            ChunkRope::load(p.rope_cos_sin + static_cast<int64_t>(key_at(first, T)) * COS_SIN_FLOATS + lane_.group * 8);
      }
    }
  }

  const mla::PagedKv& paged_kv_;
  const mla::WorkTile& tile_;
  const Lane& lane_;
  Registers& registers_;
  uint32_t page_[score_tiles];  // of the tile after the next
  Rows refill_;
};

}  // namespace cdna::mfma_16x16x32
