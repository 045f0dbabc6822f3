// The accumulator of O and the online softmax of one 16-row tile of queries, over any number of 16-key tiles of scores.
#pragma once

#include "cdna/common/accum_registers.hpp"
#include "cdna/common/cross_lane.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"

namespace cdna::mfma_16x16x32 {

// O^T of 16 rows of `columns` values. tile[t]: element r of a lane is column 16 t + 4 * lane.group + r of row
// lane.column.
template <int columns>
struct AccumO {
  static constexpr int tiles = columns / 16;
  f32x4 tile[tiles];

  MLA_DEVICE void clear() {
    // A constant zero would be kept in registers from one work tile to the next.
    const float zero = mla::bit_cast<float>(rematerialized(0));
#pragma unroll
    for (int t = 0; t < tiles; ++t) tile[t] = f32x4{zero, zero, zero, zero};
  }
  // Multiplies the output by `alpha`. The last `in_vgpr` tiles are kept in VGPRs by their owner.
  template <int in_vgpr = 0>
  MLA_DEVICE void scale(float alpha) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      if (t < tiles - in_vgpr) pin_to_agpr(tile[t]);
      tile[t] *= alpha;
      if (t < tiles - in_vgpr) pin_to_agpr(tile[t]);
      if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or all tiles pass through VGPRs at once
    }
  }
};

// The softmax of a row so far: lse comes from `sum`, outputs are divided by `divisor`.
template <bool normalizes_by_rounded_sum>
struct SoftmaxRow : mla::RowSoftmax {
  MLA_DEVICE void clear() {
    max = LOWEST;
    sum = 0.0f;
  }
  MLA_DEVICE void scale(float alpha) { sum *= alpha; }
  // Adds up the sums of the four lanes that share the row, in each of them.
  MLA_DEVICE void join(const Lane& lane) { sum = sum_over_groups(sum, lane); }
  MLA_DEVICE float divisor() const { return sum; }
};
template <>
struct SoftmaxRow<true> : mla::RowSoftmax {
  float rounded_sum;

  // No constants: LLVM 20 and 21 would store two of them at once, and then keep all three fields in LDS.
  MLA_DEVICE void clear() {
    const float zero = mla::bit_cast<float>(rematerialized(0));
    max = LOWEST;
    sum = zero;
    rounded_sum = zero;
  }
  MLA_DEVICE void scale(float alpha) {
    sum *= alpha;
    rounded_sum *= alpha;
  }
  MLA_DEVICE void join(const Lane& lane) {
    sum = sum_over_groups(sum, lane);
    rounded_sum = sum_over_groups(rounded_sum, lane);
  }
  MLA_DEVICE float divisor() const { return rounded_sum; }
};

// Softmax of 16 query rows over `score_tiles` tiles of 16 keys: element r of tile T of a lane is key
// 16 T + 4 * lane.group + r.
template <class Policy, class Pv, int score_tiles>
struct TileSoftmax {
  static constexpr int products = score_tiles * 16 / Pv::keys;  // of PV, per column tile
  using Scores = f32x4[score_tiles];
  using P = typename Pv::Rows[products];
  using Row = SoftmaxRow<Pv::normalizes_by_rounded_sum>;

  // Raises the row's running max so that no P exceeds 2^headroom. Returns alpha, the factor of what was accumulated so
  // far.
  MLA_DEVICE static float raise_max(Row& row, float lane_max, float scale, const Lane& lane) {
    const float max = __builtin_fmaxf(row.max, max_over_groups(lane_max, lane) * scale - Pv::headroom);
    const float alpha = Policy::exp2(row.max - max);
    row.max = max;
    row.scale(alpha);
    return alpha;
  }

  // Scores become P. The lane's part of the row's sums stays in the lane.
  MLA_DEVICE static void compute_p(Scores& scores, float scale, Row& row, P& p) {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float score = scores[T][r];
        scores[T][r] = Policy::exp2(__builtin_fmaf(score, scale, -row.max));
      }
      row.sum += (scores[T][0] + scores[T][1]) + (scores[T][2] + scores[T][3]);
    }
#pragma unroll
    for (int n = 0; n < products; ++n) {
      p[n] = Pv::pack(scores + n * (Pv::keys / 16));
      if constexpr (Pv::normalizes_by_rounded_sum) row.rounded_sum += Pv::sum_of(p[n]);
    }
  }

  // Returns the scale of a row's accumulated output, given `scale`, the one that divides by `sum`.
  MLA_DEVICE static float output_scale(float scale, float sum, float divisor) {
    if constexpr (!Pv::normalizes_by_rounded_sum) return scale;
    return mla::bit_cast<uint32_t>(divisor) != 0 ? scale * sum * Policy::reciprocal(divisor) : 0.0f;
  }
};

}  // namespace cdna::mfma_16x16x32
