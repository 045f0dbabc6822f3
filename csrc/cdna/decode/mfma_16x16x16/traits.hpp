// Which pipeline decodes a problem.
#pragma once

#include "cdna/decode/mfma_16x16x16/mainloop_key_split.hpp"
#include "cdna/decode/mfma_16x16x16/mainloop_row_split.hpp"

namespace cdna {

template <class Policy, class Problem, bool one_tile = Problem::row_tiles == 1>
struct Pipeline {
  using Decode = KeySplitDecode<Policy, Problem>;
};
template <class Policy, class Problem>
struct Pipeline<Policy, Problem, false> {
  using Decode = RowSplitDecode<Policy, Problem>;
};

template <class Policy, class Problem>
using Decode = typename Pipeline<Policy, Problem>::Decode;

}  // namespace cdna
