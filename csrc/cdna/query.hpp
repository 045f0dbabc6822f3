// The 16 query rows of a matrix tile, kept in registers as right operands.
#pragma once

#include "cdna/types.hpp"
#include "mla/mask.hpp"

namespace cdna {

template <class Problem>
struct QueryTile {
  static constexpr int chunks = Problem::qk_dim / 32;
  u32x4 chunk[chunks];   // chunk c: columns 32 c + 8 * lane.group + 0..7 of row lane.column

  // Rows past the sequence's last repeat it; they are never stored.
  MLA_DEVICE static QueryTile load(const mla::DecodeParams& p, const mla::SequenceRows& rows, int first_row, const Lane& lane) {
    const int row = first_row + lane.column < rows.rows ? first_row + lane.column : rows.rows - 1;
    const int token = mla::SequenceRows::token_of(p, row);
    const int head = row - token * p.heads;
    const int64_t batch_start = p.cu_seqlens_q ? rows.first_token * p.q_token_stride : static_cast<int64_t>(rows.sequence) * p.q_batch_stride;
    const int64_t start = batch_start + token * p.q_token_stride + head * p.q_head_stride;
    const char* q = static_cast<const char*>(p.q) + start * Problem::Element::bytes + lane.group * 16;
    QueryTile tile;
#pragma unroll
    for (int c = 0; c < chunks; ++c) tile.chunk[c] = *reinterpret_cast<const u32x4*>(q + c * 64);
    return tile;
  }
};

// Keys below this are visible to the lane's row of the tile.
MLA_DEVICE int visible_keys(const mla::DecodeParams& p, const mla::SequenceRows& rows, int first_row, const Lane& lane) {
  const int row = first_row + lane.column < rows.rows ? first_row + lane.column : rows.rows - 1;
  return rows.visible_keys(p, mla::SequenceRows::token_of(p, row));
}

}  // namespace cdna
