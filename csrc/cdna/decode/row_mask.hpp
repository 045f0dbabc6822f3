// Which keys the query rows of a wave see: below the causal limit, in a sliding window, in a tree of drafts.
#pragma once

#include "cdna/common/cross_lane.hpp"
#include "cdna/common/types.hpp"
#include "common/mask.hpp"
#include "common/online_softmax.hpp"
#include "common/work_tile.hpp"

namespace cdna {

// The tiles of keys that every row of a wave sees whole: those that begin at one of `count` keys from `first` on, so
// that one comparison spares the others of the mainloop a mask.
struct WholeTiles {
  int first;
  uint32_t count;

  // `first_row` is the wave's first row, which of its rows has the lowest causal limit.
  template <int tile_keys>
  MLA_DEVICE static WholeTiles of(const mla::DecodeParams& p, const mla::SequenceRows& rows, const mla::WorkTile& tile,
                                  int first_row) {
    const int first = uniform(rows.first_visible(p, rows.q_len - 1));
    int end = uniform(rows.visible_keys(p, mla::SequenceRows::token_of(p, first_row)));
    if (p.tree_mask) end = rows.kv_len - rows.q_len;
    end = end < tile.end_key ? end : tile.end_key;
    const int count = end - tile_keys - first + 1;
    return WholeTiles{first, static_cast<uint32_t>(count > 0 ? count : 0)};
  }

  // `position` is that of a tile's first key, counted from `first`.
  MLA_DEVICE bool begins_one(int position) const { return static_cast<uint32_t>(position) < count; }
};

// The keys of a work tile that the lane's row of a 16-row tile sees: `count` from the position `first` on, without the
// drafts of a tree whose bits `unseen` has. With a tree `first` lies FIRST_DRAFT before its first draft, modulo 2^32, so
// that the drafts need no number of their own.
struct RowMask {
  static constexpr uint32_t FIRST_DRAFT = 0x80000000;
  uint32_t first, count;
  uint64_t unseen;

  // Positions are counted from key `base`.
  MLA_DEVICE static RowMask of(const mla::DecodeParams& p, const mla::SequenceRows& rows, const mla::WorkTile& tile,
                               int base, int first_row, const Lane& lane) {
    const int row = first_row + lane.column < rows.rows ? first_row + lane.column : rows.rows - 1;
    const int token = mla::SequenceRows::token_of(p, row);
    const int visible = rows.visible_keys(p, token);
    const int end = visible < tile.end_key ? visible : tile.end_key;
    if (p.tree_mask) {
      const uint32_t first = static_cast<uint32_t>(rows.kv_len - rows.q_len) - FIRST_DRAFT;
      return RowMask{first - base, end - first, ~rows.tree_of(p, token)};
    }
    const int first = rows.first_visible(p, token);
    return RowMask{static_cast<uint32_t>(first - base), static_cast<uint32_t>(end < first ? 0 : end - first), 0};
  }

  // Scores of keys that the row does not see become -inf. scores[T][r] is that of the key at `position` + 16 T + r.
  template <int score_tiles>
  MLA_DEVICE void apply(f32x4* scores, int position) const {
    // A new value, or what follows from it alone would be kept in scalar registers for the mainloop.
    const uint32_t place = rematerialized(static_cast<int>(position - first));
#pragma unroll
    for (int T = 0; T < score_tiles; ++T)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float score = scores[T][r];
        scores[T][r] = place + 16 * T + r < count ? score : mla::MINUS_INFINITY;
      }
    if (!any_lane(unseen != 0)) return;
#pragma unroll
    for (int T = 0; T < score_tiles; T += 2) {
      // Shifts both ways: mla::tree_bits has branches, which take scalar registers that fp8 kernels do not have.
      const int draft = static_cast<int>(place + 16 * T - FIRST_DRAFT);
      const int distance = draft < 0 ? -draft : draft;
      const int shift = distance < 63 ? distance : 63;
      const uint32_t hidden = static_cast<uint32_t>(draft < 0 ? unseen << shift : unseen >> shift);
#pragma unroll
      for (int i = 0; i < (score_tiles > 1 ? 8 : 4); ++i) {
        const float score = scores[T + i / 4][i % 4];
        scores[T + i / 4][i % 4] = hidden >> (i / 4 * 16 + i % 4) & 1 ? mla::MINUS_INFINITY : score;
      }
    }
  }
};

}  // namespace cdna
