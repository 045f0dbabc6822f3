// The 16 query rows of a matrix tile, kept in registers as right operands.
#pragma once

#include "cdna/common/convert.hpp"
#include "cdna/common/lds.hpp"
#include "common/kv_format.hpp"
#include "common/mask.hpp"
#include "common/online_softmax.hpp"

namespace cdna {

// The row of a tile that a lane holds. Rows past the sequence's last repeat it; they are never stored.
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

// `columns`: how many consecutive columns of a key a lane holds at once, 8 or 16. With 8, chunk c of a lane is columns
// 32 c + 8 * lane.group + 0..7 of row lane.column; with 16, chunks 2 c and 2 c + 1 are columns 64 c + 16 * lane.group +
// 0..15.
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
      constexpr int together = columns / 8;
      const char* at = q + (c / together * 32 * together + c % together * 8) * Stored::bytes;
      if constexpr (Stored::bytes == 1) {
        tile.chunk[c] = fp8_to_bf16(*reinterpret_cast<const u32x2*>(at));
      } else {
        tile.chunk[c] = *reinterpret_cast<const u32x4*>(at);
      }
    }
    return tile;
  }

  // Passes the tile through LDS, `lds` being the wave's own 3 KiB. What is computed is born in an ordinary register and
  // copied there again for each product; what is loaded may stay in an accumulation register and be multiplied from it.
  MLA_DEVICE void reload(LdsBytes lds, const Lane& lane) {
    constexpr int together = 3;
    static_assert(chunks % together == 0, "query: whole groups of chunks");
    const LdsBytes at = lds + lane.index * 16;
#pragma unroll
    for (int c = 0; c < chunks; c += together) {
#pragma unroll
      for (int n = 0; n < together; ++n) lds_write16(at + n * WAVE * 16, chunk[c + n]);
      wave_lds_fence();
#pragma unroll
      for (int n = 0; n < together; ++n) chunk[c + n] = lds_read16(at + n * WAVE * 16);
      wave_lds_fence();
    }
  }
};

// What turns a score into an exponent of 2: softmax_scale and, where the format has them, both descales. softmax_scale
// is positive and no descale negative, but one may be 0 (of a tensor of zeros): 0 times a masked score of -inf is NaN.
template <class Format>
MLA_DEVICE float score_scale(const mla::DecodeParams& p) {
  constexpr float as_good_as_zero = 1e-30f;
  const float scale = p.softmax_scale * mla::LOG2_E;
  if constexpr (!Format::descaled) return scale;
  const float descaled = scale * mla::descale(p.q_descale) * mla::descale(p.kv_descale);
  const uint32_t bits = opaque(mla::bit_cast<uint32_t>(descaled));  // a comparison of floats would take NaN for 0
  return bits << 1 == 0 ? as_good_as_zero : mla::bit_cast<float>(bits);
}

// What the averages of stored values are multiplied by.
template <class Format>
MLA_DEVICE float value_scale(const mla::DecodeParams& p) {
  return Format::descaled ? mla::descale(p.kv_descale) : 1.0f;
}

// Keys below this are visible to the lane's row of the tile.
MLA_DEVICE int visible_keys(const mla::DecodeParams& p, const mla::SequenceRows& rows, int first_row,
                            const Lane& lane) {
  const int row = first_row + lane.column < rows.rows ? first_row + lane.column : rows.rows - 1;
  return rows.visible_keys(p, mla::SequenceRows::token_of(p, row));
}

}  // namespace cdna
