// Where a finished row goes: out and lse when the item is its sequence's only one, else one row of the partials.
#pragma once

#include "mla/device.hpp"
#include "mla/mask.hpp"
#include "mla/online_softmax.hpp"
#include "mla/problem.hpp"
#include "mla/work_item.hpp"

namespace mla {

template <class Policy, class Element>
class RowSink {
 public:
  MLA_DEVICE RowSink(const DecodeParams& p, const WorkItem& item, const SequenceRows& rows, int row)
      : final_(item.partial_row < 0), stored_(row < rows.rows) {
    const int64_t place = final_ ? rows.first_token * p.heads + row : static_cast<int64_t>(item.partial_row) * p.rows + row;
    out_ = final_ ? static_cast<char*>(p.out) + place * (VALUE_DIM * Element::bytes)
                  : reinterpret_cast<char*>(p.partial_out + place * VALUE_DIM);
    lse_ = (final_ ? p.lse : p.partial_lse) + place;
    has_sink_ = final_ && p.attn_sink;
    sink_ = has_sink_ && stored_ ? p.attn_sink[row - SequenceRows::token_of(p, row) * p.heads] : 0.0f;
  }

  // The factor that turns a row's accumulated output into what is stored, and its lse.
  MLA_DEVICE RowResult<Policy> finish(float max, float sum) const {
    RowResult<Policy> result = RowResult<Policy>::of(max, sum);
    if (has_sink_) result.add_sink(sink_);
    return result;
  }

  MLA_DEVICE void store_lse(float lse) const {
    if (stored_) *lse_ = lse;
  }

  // N consecutive values from column `column`, a multiple of N; N is 4 or 8.
  template <int N>
  MLA_DEVICE void store(int column, const Vec<float, N>& values) const {
    if (!stored_) return;
    if (final_) {
      Vec<uint32_t, N / 2> packed;
#pragma unroll
      for (int i = 0; i < N; i += 2) packed[i / 2] = Policy::template pack<Element>(values[i], values[i + 1]);
      *reinterpret_cast<Vec<uint32_t, N / 2>*>(out_ + column * Element::bytes) = packed;
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        *reinterpret_cast<Vec<float, 4>*>(out_ + (column + i) * 4) =
            Vec<float, 4>{{values[i], values[i + 1], values[i + 2], values[i + 3]}};
      }
    }
  }

 private:
  char* out_;
  float* lse_;
  float sink_;
  bool final_;
  bool stored_;
  bool has_sink_;
};

}  // namespace mla
