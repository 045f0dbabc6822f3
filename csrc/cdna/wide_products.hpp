// The two products of a tile on CDNA4's matrix instructions, by how queries, keys and weights are stored. As in
// attention_tile.hpp both are held transposed, so a lane owns one query row and weights never leave their lane.
//
// A lane holds 16-byte pieces of a row: piece m is bytes 64 m + 16 * lane.group + 0..15, of a key or of a query.
#pragma once

#include "cdna/accumulation.hpp"
#include "cdna/cross_lane.hpp"
#include "cdna/query.hpp"
#include "cdna/slotted_tile.hpp"
#include "mla/online_softmax.hpp"
#include "mla/problem.hpp"

namespace cdna {

// Keys in the type of the products (bf16, fp16): `steps` of two pieces, a product each.
template <class Policy, class Problem>
struct SameTypeScores {
  using Element = typename Problem::Element;
  using Query = QueryTile<Problem, 8>;

  MLA_DEVICE static f32x4 multiply(u32x4 keys, const Query& query, int m, f32x4 sum) {
    return Matrix16x16x32<Element>::multiply(keys, query.chunk[m], sum);
  }
  MLA_DEVICE static f32x4 multiply_block(u32x4 low, u32x4 high, const Query& query, int n, f32x4 sum) {
    return multiply(high, query, 2 * n + 1, multiply(low, query, 2 * n, sum));
  }
};

// How many keys one product of the values takes, and how it takes them.
template <class Policy, class Element_>
struct WideValues {
  using Element = Element_;
  static constexpr int keys = 32;
  static constexpr int reads = 2;   // of ColumnPieces
  using Columns = u32x4;
  using Rows = u32x4;

  MLA_DEVICE static Columns columns(const u32x2 (&read)[reads]) { return u32x4{read[0][0], read[0][1], read[1][0], read[1][1]}; }
  MLA_DEVICE static f32x4 multiply(Columns columns, Rows rows, f32x4 sum) {
    return Matrix16x16x32<Element>::multiply(columns, rows, sum);
  }
  // Weights of 32 keys: both 16-key tiles of scores, four keys each.
  MLA_DEVICE static Rows pack(const f32x4* p) {
    return u32x4{Policy::template pack_weights<Element>(p[0][0], p[0][1]), Policy::template pack_weights<Element>(p[0][2], p[0][3]),
                 Policy::template pack_weights<Element>(p[1][0], p[1][1]), Policy::template pack_weights<Element>(p[1][2], p[1][3])};
  }
};

// O^T of 16 rows. tile[t]: element r of a lane is column 16 t + 4 * lane.group + r of row lane.column.
struct WideOutput {
  static constexpr int tiles = mla::VALUE_DIM / 16;
  f32x4 tile[tiles];

  MLA_DEVICE void clear() {
    const float zero = mla::bit_cast<float>(rederived(0));   // a constant would be kept in registers between items
#pragma unroll
    for (int t = 0; t < tiles; ++t) tile[t] = f32x4{zero, zero, zero, zero};
  }
  // The last `ordinary` tiles are kept in ordinary registers by their owner.
  template <int ordinary = 0>
  MLA_DEVICE void scale(float factor) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      if (t < tiles - ordinary) keep_accumulated(tile[t]);
      tile[t] *= factor;
      if (t < tiles - ordinary) keep_accumulated(tile[t]);
      if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);   // or all tiles pass through ordinary registers at once
    }
  }
};

// Softmax of 16 query rows over `score_tiles` tiles of 16 keys: element r of tile T of a lane is key
// 16 T + 4 * lane.group + r.
template <class Policy, int score_tiles>
struct WideSoftmax {
  using Scores = f32x4[score_tiles];

  // Scores of keys the row may not see become -inf.
  MLA_DEVICE static void mask(Scores& scores, int first_key, int visible, const Lane& lane) {
    const int seen = visible - first_key - 4 * lane.group;
#pragma unroll
    for (int T = 0; T < score_tiles; ++T)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float score = scores[T][r];
        scores[T][r] = 16 * T + r < seen ? score : mla::MINUS_INFINITY;
      }
  }

  MLA_DEVICE static float largest(const Scores& scores) {
    float largest = scores[0][0];
#pragma unroll
    for (int n = 1; n < 4 * score_tiles; ++n) {
      const float score = scores[n / 4][n % 4];
      largest = __builtin_fmaxf(largest, score);
    }
    return largest;
  }

  // A new reference for the row, not below any score; the factor for what was accumulated so far.
  MLA_DEVICE static float raise_reference(mla::RowSoftmax& row, float lane_largest, float scale, const Lane& lane) {
    const float max = __builtin_fmaxf(row.max, max_over_groups(lane_largest, lane) * scale);
    const float factor = Policy::exp2(row.max - max);
    row.max = max;
    row.sum *= factor;
    return factor;
  }

  // Scores become weights. The lane's part of the sum stays in the lane.
  MLA_DEVICE static void weigh(Scores& scores, float scale, mla::RowSoftmax& row) {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float score = scores[T][r];
        scores[T][r] = Policy::exp2(__builtin_fmaf(score, scale, -row.max));
      }
      row.sum += (scores[T][0] + scores[T][1]) + (scores[T][2] + scores[T][3]);
    }
  }
};

}  // namespace cdna
