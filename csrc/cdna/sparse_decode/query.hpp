// The query rows of one 16-row matrix tile of sparse decode: heads of one query token, kept in registers as right
// operands.
#pragma once

#include "cdna/common/types.hpp"
#include "common/selection.hpp"

namespace cdna::sparse {

// The layout is that of dense decode's QueryTile. The loader is not shared: with QueryTile's, LLVM 22 orders every
// sparse kernel otherwise and makes some of them two instructions longer.
//
// Chunk c of a lane is columns 32 c + 8 * lane.group + 0..7 of row lane.column.
template <int qk_dim>
struct SparseQueryTile {
  static constexpr int chunks = qk_dim / 32;
  u32x4 chunk[chunks];

  // Rows past the last head repeat it; the epilogue never stores them.
  MLA_DEVICE void load(const mla::SparseDecodeParams& p, int token, int first_row, const Lane& lane) {
    const int row = first_row + lane.column < p.heads ? first_row + lane.column : p.heads - 1;
    const uint16_t* q =
        static_cast<const uint16_t*>(p.q) + token * p.q_token_stride + row * p.q_head_stride + lane.group * 8;
#pragma unroll
    for (int c = 0; c < chunks; ++c) chunk[c] = *reinterpret_cast<const u32x4*>(q + c * 32);
  }
};

}  // namespace cdna::sparse
