// The query rows of one 16-row matrix tile, kept in registers as right operands.
#pragma once

#include "cdna/common/convert.hpp"
#include "cdna/common/lds.hpp"
#include "common/kv_format.hpp"
#include "common/mask.hpp"
#include "common/online_softmax.hpp"

namespace cdna {

// Returns the first byte of the query row that a lane holds. Rows past the sequence's last repeat it; the epilogue
// never stores them.
template <class Stored>
MLA_DEVICE const char* query_row(const mla::DecodeParams& p, const mla::SequenceRows& rows, int first_row,
                                 const Lane& lane) {
  const int row = first_row + lane.column < rows.rows ? first_row + lane.column : rows.rows - 1;
  const int token = mla::SequenceRows::token_of(p, row);
  const int head = row - token * p.heads;
  const int64_t batch_start =
      p.cu_seqlens_q ? rows.first_token * p.q_token_stride : static_cast<int64_t>(rows.sequence) * p.q_batch_stride;
  const int64_t start = batch_start + token * p.q_token_stride + head * p.q_head_stride;
  return static_cast<const char*>(p.q) + start * Stored::bytes;
}

// `columns` is how many consecutive columns of a key a lane holds at once, 8 or 16. With 8, chunk c of a lane is
// columns 32 c + 8 * lane.group + 0..7 of row lane.column; with 16, chunks 2 c and 2 c + 1 are columns 64 c + 16 *
// lane.group + 0..15.
template <class Problem, int columns = 8>
struct QueryTile {
  using Stored = typename Problem::Format::StoredQuery;
  static constexpr int chunks = Problem::qk_dim / 32;
  u32x4 chunk[chunks];

  MLA_DEVICE static QueryTile load(const mla::DecodeParams& p, const mla::SequenceRows& rows, int first_row,
                                   const Lane& lane) {
    const char* q = query_row<Stored>(p, rows, first_row, lane) + lane.group * columns * Stored::bytes;
    QueryTile tile;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      constexpr int per_load = columns / 8;  // chunks
      const char* at = q + (c / per_load * 32 * per_load + c % per_load * 8) * Stored::bytes;
      tile.chunk[c] = *reinterpret_cast<const u32x4*>(at);
    }
    return tile;
  }
};

}  // namespace cdna
