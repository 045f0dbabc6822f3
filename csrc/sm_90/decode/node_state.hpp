// Partials of a decode that folds splits by a plan: the splits of a node may be in several work tiles. Such a partial is
// the state of the node's fold (sm_90/split_fold.hpp), with which combine goes on, and not a result: the sum of results
// in place of one, and the base and the sum of weights in place of a log-sum-exp.
#pragma once

#include "common/params/decode_tma.hpp"

namespace mla::sm_90 {

// Whether a work tile of a decode that folds stores a state; `partial` says that it stores no final result.
MLA_DEVICE bool is_state(const DecodeTmaParams& params, bool partial) { return partial && params.plan != nullptr; }

// The base and the sum of weights of a row.
MLA_DEVICE float* state_of(const DecodeTmaParams& params, int partial_row, int row) {
  return params.partial_lse + (static_cast<int64_t>(partial_row) * params.rows + row) * 2;
}

}  // namespace mla::sm_90
