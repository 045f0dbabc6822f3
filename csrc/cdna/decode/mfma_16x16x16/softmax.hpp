// The accumulator of O and the softmax of one 16-row tile of queries against 16 keys.
//
// Everything is held transposed: scores S^T (keys x rows) = K Q^T and output O^T (columns x rows) = V^T P^T. A lane
// owns one query row (lane.column), so softmax needs no broadcast, and the accumulator of S^T is, rounded, the right
// operand of the second product: P never leaves its lane.
#pragma once

#include "cdna/common/accum_registers.hpp"
#include "cdna/common/cross_lane.hpp"
#include "cdna/common/mfma_16x16x16.hpp"
#include "cdna/common/transpose.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"

namespace cdna::mfma_16x16x16 {

constexpr int BLOCK_COLUMNS = 128;  // output columns that one transposed read brings
constexpr int BLOCK_TILES = 8;

// O^T of 16 rows. tile[b][t]: element r of a lane is column 128 b + 8 * (4 * lane.group + r) + t of row lane.column.
template <int columns>
struct AccumO {
  static constexpr int blocks = columns / BLOCK_COLUMNS;
  f32x4 tile[blocks][BLOCK_TILES];

  MLA_DEVICE void clear() {
    // A constant zero would be kept in registers from one work tile to the next.
    const float zero = mla::bit_cast<float>(rematerialized(0));
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int t = 0; t < BLOCK_TILES; ++t) tile[b][t] = f32x4{zero, zero, zero, zero};
  }
  // Multiplies the output by `alpha`. The last `in_vgpr` tiles are kept in VGPRs by their owner.
  template <int in_vgpr = 0>
  MLA_DEVICE void scale(float alpha) {
#pragma unroll
    for (int n = 0; n < blocks * BLOCK_TILES; ++n) {
      f32x4& x = tile[n / BLOCK_TILES][n % BLOCK_TILES];
      const bool in_agpr = n < blocks * BLOCK_TILES - in_vgpr;
      if (in_agpr) pin_to_agpr(x);
      x *= alpha;
      if (in_agpr) pin_to_agpr(x);
      if (n % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or all tiles pass through VGPRs at once
    }
  }
};

// Online softmax of one tile's scores. Element r of a lane is key `first_key` + 4 * lane.group + r.
template <class Policy, class Element>
struct TileSoftmax {
  MLA_DEVICE static float lane_max(f32x4 scores) {
    return __builtin_fmaxf(__builtin_fmaxf(scores[0], scores[1]), __builtin_fmaxf(scores[2], scores[3]));
  }

  // Raises the row's running max so that no score exceeds it. Returns alpha, the factor of what was accumulated so far.
  MLA_DEVICE static float raise_max(mla::RowSoftmax& row, float lane_max, float scale, const Lane& kept) {
    const float max = __builtin_fmaxf(row.max, max_over_groups(lane_max, kept.rematerialized()) * scale);
    const float alpha = Policy::exp2(row.max - max);
    row.max = max;
    row.sum *= alpha;
    return alpha;
  }

  // P^T as a right operand: four keys of one row. The lane's part of the row's sum stays in the lane.
  MLA_DEVICE static u32x2 compute_p(f32x4 scores, float scale, mla::RowSoftmax& row) {
    const float p0 = Policy::exp2(__builtin_fmaf(scores[0], scale, -row.max));
    const float p1 = Policy::exp2(__builtin_fmaf(scores[1], scale, -row.max));
    const float p2 = Policy::exp2(__builtin_fmaf(scores[2], scale, -row.max));
    const float p3 = Policy::exp2(__builtin_fmaf(scores[3], scale, -row.max));
    row.sum += (p0 + p1) + (p2 + p3);
    return u32x2{Policy::template pack_p<Element>(p0, p1), Policy::template pack_p<Element>(p2, p3)};
  }
};

}  // namespace cdna::mfma_16x16x16
