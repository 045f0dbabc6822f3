// The target of a finished row: out and lse when the work tile is its sequence's only one, else one row of the partial
// results.
#pragma once

#include "common/device.hpp"
#include "common/mask.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"
#include "common/work_tile.hpp"

namespace mla {

// `value_dim` is the length of a row of results.
template <class Policy, class Element, int value_dim = VALUE_DIM>
class RowSink {
 public:
  MLA_DEVICE RowSink(const DecodeParams& p, const WorkTile& tile, const SequenceRows& rows, int row)
      : final_(tile.partial_row < 0), stored_(row < rows.rows), absent_(!final_ && !stored_ && row < p.rows) {
    const int token = SequenceRows::token_of(p, row);
    const int head = row - token * p.heads;
    if (final_) {
      const int64_t at = (rows.first_token + token) * p.out_token_stride + head * p.out_head_stride;
      out_ = static_cast<char*>(p.out) + at * Element::bytes;
      lse_ = p.lse + rows.first_token * p.heads + row;
    } else {
      const int64_t at = static_cast<int64_t>(tile.partial_row) * p.rows + row;
      out_ = reinterpret_cast<char*>(p.partial_out + at * value_dim);
      lse_ = p.partial_lse + at;
    }
    has_sink_ = final_ && p.attn_sink;
    sink_ = has_sink_ && stored_ ? p.attn_sink[head] : 0.0f;
  }

  // Returns the scale of a row's accumulated output, and its lse.
  MLA_DEVICE RowResult<Policy> finish(float max, float sum) const {
    RowResult<Policy> result = RowResult<Policy>::of(max, sum);
    if (has_sink_) result.add_sink(sink_);
    return result;
  }

  // Rows that a short sequence of a ragged batch lacks are marked as empty, so that combine never reads them.
  MLA_DEVICE void store_lse(float lse) const {
    if (stored_ || absent_) *lse_ = stored_ ? lse : MINUS_INFINITY;
  }

  // Stores `count` vectors of the row: vector(i, values) fills N consecutive values and returns their first column, a
  // multiple of N; N is 4 or 8. All share one branch, for a branch per vector costs scalar registers the kernels lack.
  template <int N, int count, class Vector>
  MLA_DEVICE void store(const Vector& vector) const {
    if (!stored_) return;
    if (final_) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        Vec<float, N> values;
        const int column = vector(i, values);
        Vec<uint32_t, N / 2> packed;
#pragma unroll
        for (int n = 0; n < N; n += 2) packed[n / 2] = Policy::template pack<Element>(values[n], values[n + 1]);
        *reinterpret_cast<Vec<uint32_t, N / 2>*>(out_ + column * Element::bytes) = packed;
      }
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        Vec<float, N> values;
        const int column = vector(i, values);
#pragma unroll
        for (int n = 0; n < N; n += 4) {
          *reinterpret_cast<Vec<float, 4>*>(out_ + (column + n) * 4) =
              Vec<float, 4>{{values[n], values[n + 1], values[n + 2], values[n + 3]}};
        }
      }
    }
  }

 private:
  char* out_;
  float* lse_;
  float sink_;
  bool final_;
  bool stored_;
  bool absent_;
  bool has_sink_;
};

}  // namespace mla
