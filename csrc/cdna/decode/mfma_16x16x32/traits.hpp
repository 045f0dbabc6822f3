// Decode on CDNA4: which arithmetic and which pipeline a problem takes.
#pragma once

#include "cdna/decode/mfma_16x16x32/mainloop_key_split.hpp"
#include "cdna/decode/mfma_16x16x32/mainloop_row_split.hpp"

namespace cdna {

// What a tile holds: `shared_keys` where the waves share it, `private_keys` where each has its own. `splits_keys`: few
// rows are worth splitting the waves over keys as well.

// 16-bit caches: everything in the type of the cache.
template <class Policy, class Problem>
struct SameTypeArithmetic {
  static constexpr bool splits_keys = false;
  static constexpr int shared_keys = 32;
  static constexpr int private_keys = 32;
  using Scores = QkSameType<Problem>;
  using SharedValues = PvSameType<Policy, typename Problem::Element>;
  using PrivateValues = SharedValues;
};

// fp8 caches, by the type of the queries and that of the weights.
template <class Policy, class Problem, class Query, class Weight>
struct Fp8Arithmetic;

template <class Policy, class Problem>
struct Fp8Arithmetic<Policy, Problem, mla::bf16, mla::bf16> {
  static constexpr bool splits_keys = true;
  static constexpr int shared_keys = 64;
  static constexpr int private_keys = 64;
  using Scores = QkFp8ToBf16<Policy, Problem>;
  using SharedValues = PvFp8ToBf16<Policy>;
  using PrivateValues = SharedValues;
};

template <class Policy, class Problem>
struct Fp8Arithmetic<Policy, Problem, mla::fp8, mla::bf16> : Fp8Arithmetic<Policy, Problem, mla::bf16, mla::bf16> {
  using Scores = QkFp8<Problem>;
};

// One row tile has clocks to spare: a private tile is multiplied 32 keys at a time.
template <class Policy, class Problem>
struct Fp8Arithmetic<Policy, Problem, mla::fp8, mla::fp8> {
  static constexpr bool splits_keys = false;
  static constexpr int shared_keys = 128;
  static constexpr int private_keys = 64;
  using Scores = QkFp8<Problem>;
  using SharedValues = PvFp8<Policy, 128>;
  using PrivateValues = PvFp8<Policy, 32>;
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
