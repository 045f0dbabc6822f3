// The query rows of a workgroup in sparse_decode (heads of one query token), and where their results go.
#pragma once

#include "cdna/common/types.hpp"
#include "common/kv_format.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"
#include "common/selection.hpp"

namespace cdna {

// Before LLVM 22 a constant zero would be kept in registers between items; LLVM 22 finds better without being told.
MLA_DEVICE float rematerialized_zero() {
#if __clang_major__ < 22
  return mla::bit_cast<float>(rematerialized(0));
#else
  return 0.0f;
#endif
}

// 16 query rows as right operands: chunk c of a lane is columns 32 c + 8 * lane.group + 0..7 of row lane.column.
template <int qk_dim>
struct SparseQueryTile {
  static constexpr int chunks = qk_dim / 32;
  u32x4 chunk[chunks];

  // Rows past the last head repeat it; they are never stored.
  MLA_DEVICE void load(const mla::SparseDecodeParams& p, int token, int first_row, const Lane& lane) {
    const int row = first_row + lane.column < p.heads ? first_row + lane.column : p.heads - 1;
    const uint16_t* q =
        static_cast<const uint16_t*>(p.q) + token * p.q_token_stride + row * p.q_head_stride + lane.group * 8;
#pragma unroll
    for (int c = 0; c < chunks; ++c) chunk[c] = *reinterpret_cast<const u32x4*>(q + c * 32);
  }
};

// One row's place in out and lse, or in the partials. `weight` is what its accumulated output is multiplied by.
template <class Policy>
class SparseEpilogue {
 public:
  float weight;

  MLA_DEVICE SparseEpilogue(const mla::SparseDecodeParams& p, const mla::WorkItem& item, int row, float max, float sum)
      : weight(0.0f), lse_(mla::MINUS_INFINITY), final_(item.partial_row < 0), stored_(row < p.heads) {
    // By its bits, so that the sum of a row with a NaN among its keys counts, and stays NaN.
    if (mla::bit_cast<uint32_t>(sum) != 0) {
      weight = Policy::reciprocal(sum);
      lse_ = (max + Policy::log2(sum)) * mla::LN_2;
    }
    const int head = stored_ ? row : 0;
    if (final_) {
      out_ = static_cast<char*>(p.out) + (item.sequence * p.out_token_stride + head * p.out_head_stride) * 2;
      lse_at_ = p.lse + static_cast<int64_t>(item.sequence) * p.heads + head;
      if (p.attn_sink && weight > 0.0f)
        weight *= Policy::reciprocal(1.0f + Policy::exp2((p.attn_sink[head] - lse_) * mla::LOG2_E));
    } else {
      const int64_t at = static_cast<int64_t>(item.partial_row) * p.heads + head;
      out_ = reinterpret_cast<char*>(p.partial_out + at * mla::VALUE_DIM);
      lse_at_ = p.partial_lse + at;
    }
  }

  MLA_DEVICE void store_lse() const {
    if (stored_) *lse_at_ = lse_;
  }

  // Four values from `first_column` + 16 t on, for every t below `count`.
  template <int count, class Values>
  MLA_DEVICE void store(int first_column, const Values& values) const {
    if (!stored_) return;
    if (final_) {
#pragma unroll
      for (int t = 0; t < count; ++t) {
        const f32x4 x = values(t) * weight;
        const float a = x[0], b = x[1], c = x[2], d = x[3];
        *reinterpret_cast<u32x2*>(out_ + (first_column + 16 * t) * 2) =
            u32x2{Policy::template pack<mla::bf16>(a, b), Policy::template pack<mla::bf16>(c, d)};
      }
    } else {
#pragma unroll
      for (int t = 0; t < count; ++t)
        *reinterpret_cast<f32x4*>(out_ + (first_column + 16 * t) * 4) = values(t) * weight;
    }
  }

 private:
  float lse_;
  bool final_;
  bool stored_;
  char* out_;
  float* lse_at_;
};

}  // namespace cdna
