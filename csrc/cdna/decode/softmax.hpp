// The online softmax of one 16-row tile of queries, over any number of 16-key tiles of scores.
//
// Everything is held transposed: scores S^T (keys x rows) = K Q^T and output O^T (columns x rows) = V^T P^T. A lane
// owns one query row (lane.column), so softmax needs no broadcast, and the accumulator of S^T is, rounded, the right
// operand of the second product: P never leaves its lane.
#pragma once

#include "cdna/common/accum_registers.hpp"
#include "cdna/common/cross_lane.hpp"
#include "common/online_softmax.hpp"

namespace cdna {

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
  // With headroom any score above the row's largest raises the running max.
  static constexpr float threshold = Pv::headroom > 0.0f ? Pv::headroom : mla::RowSoftmax::RESCALE_THRESHOLD;

  MLA_DEVICE static bool exceeds(const Row& row, float score) { return score > row.max + threshold; }

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

}  // namespace cdna
