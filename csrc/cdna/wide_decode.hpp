// Decode on CDNA4: which arithmetic and which pipeline a problem takes.
#pragma once

#include "cdna/wide_key_split.hpp"
#include "cdna/wide_row_split.hpp"

namespace cdna {

// 16-bit caches: everything in the type of the cache, 32 keys at a time.
template <class Policy, class Problem>
struct SameTypeArithmetic {
  using Scores = SameTypeScores<Policy, Problem>;
  using Values = WideValues<Policy, typename Problem::Element>;
  static constexpr int keys = 32;
};

template <class Policy, class Problem, class Arithmetic, bool one_tile = Problem::row_tiles == 1>
struct WidePipeline {
  using Decode = WideKeySplit<Policy, Problem, Arithmetic>;
};
template <class Policy, class Problem, class Arithmetic>
struct WidePipeline<Policy, Problem, Arithmetic, false> {
  using Decode = WideRowSplit<Policy, Problem, Arithmetic>;
};

template <class Policy, class Problem, class Arithmetic>
using WideDecode = typename WidePipeline<Policy, Problem, Arithmetic>::Decode;

}  // namespace cdna
