// The epilogue of sparse decode: where one finished row goes, and what its values are multiplied by on the way.
//
// It is not the one of dense decode: a workgroup has rows of one token only, so a row is a head without a division, and
// eight row tiles pass through every wave, so the sink is read only for rows that have a sum.
#pragma once

#include "cdna/common/types.hpp"
#include "common/kv_format.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"
#include "common/selection.hpp"
#include "common/work_tile.hpp"

namespace cdna::sparse {

// The target of one row: out and lse, or a row of the partial results. `scale` multiplies its accumulated output.
template <class Problem, class Policy>
class SparseEpilogue {
 public:
  float scale;

  MLA_DEVICE SparseEpilogue(const mla::SparseDecodeParams& p, const mla::WorkTile& tile, int row, float max, float sum)
      : scale(0.0f), lse_(mla::MINUS_INFINITY), final_(tile.partial_row < 0), stored_(row < p.heads) {
    // Compared by its bits, so that the sum of a row with a NaN among its keys counts and stays NaN.
    if (mla::bit_cast<uint32_t>(sum) != 0) {
      scale = Policy::reciprocal(sum);
      lse_ = (max + Policy::log2(sum)) * mla::LN_2;
    }
    const int head = stored_ ? row : 0;
    if (final_) {
      out_ = static_cast<char*>(p.out) + (tile.sequence * p.out_token_stride + head * p.out_head_stride) * 2;
      lse_at_ = p.lse + static_cast<int64_t>(tile.sequence) * p.heads + head;
      if (p.attn_sink && scale > 0.0f)
        scale *= Policy::reciprocal(1.0f + Policy::exp2((p.attn_sink[head] - lse_) * mla::LOG2_E));
    } else {
      const int64_t at = static_cast<int64_t>(tile.partial_row) * p.heads + head;
      out_ = reinterpret_cast<char*>(p.partial_out + at * mla::VALUE_DIM);
      lse_at_ = p.partial_lse + at;
    }
    if constexpr (Problem::KvFormat::descaled) scale = Policy::factor(scale * mla::descale(p.kv_descale));
  }

  MLA_DEVICE void store_lse() const {
    if (stored_) *lse_at_ = lse_;
  }

  // Stores four values from column `first_column` + `step` t on, for every t below `count`.
  template <int count, int step, class Values>
  MLA_DEVICE void store(int first_column, const Values& values) const {
    if (!stored_) return;
    if (final_) {
#pragma unroll
      for (int t = 0; t < count; ++t) {
        const f32x4 x = values(t) * scale;
        const float a = x[0], b = x[1], c = x[2], d = x[3];
        *reinterpret_cast<u32x2*>(out_ + (first_column + step * t) * 2) =
            u32x2{Policy::template pack<mla::bf16>(a, b), Policy::template pack<mla::bf16>(c, d)};
      }
    } else {
#pragma unroll
      for (int t = 0; t < count; ++t)
        *reinterpret_cast<f32x4*>(out_ + (first_column + step * t) * 4) = values(t) * scale;
    }
  }

 private:
  float lse_;
  bool final_;
  bool stored_;
  char* out_;
  float* lse_at_;
};

}  // namespace cdna::sparse
