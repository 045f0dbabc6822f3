// The dense decode kernel of archs with 16x16x16 matrix instructions (16x16x32 of fp8) and neither transposed LDS reads
// nor wide copies to LDS (CDNA3): in which types a problem is multiplied, and which parts its kernel is made of.
#pragma once

#include "cdna/decode/epilogue.hpp"
#include "cdna/decode/kernel.hpp"
#include "cdna/decode/mainloop_row_split.hpp"
#include "cdna/decode/mfma_16x16x16/mainloop_key_split.hpp"
#include "cdna/decode/mfma_16x16x16/producer_kv_stage.hpp"
#include "cdna/decode/mfma_16x16x16/producer_registers.hpp"
#include "cdna/decode/mfma_16x16x16/row_split_fragments.hpp"

namespace cdna::mfma_16x16x16 {

// The types of both products and the keys of a stage that the waves share. `splits_keys` says that up to four row tiles
// are worth splitting the waves over keys as well.

// 16-bit caches: every operand has the type of the cache.
template <class Problem, class Policy>
struct SameTypeMma {
  static constexpr bool splits_keys = false;
  static constexpr int shared_keys = 16;
  using Qk = QkSameType<Problem>;
  using Pv = PvSameType<Policy, typename Problem::Element>;
};

// fp8 caches, by the type of the queries and that of P.
template <class Problem, class Policy, class Query, class P>
struct Fp8Mma;

template <class Problem, class Policy>
struct Fp8Mma<Problem, Policy, mla::bf16, mla::bf16> {
  static constexpr bool splits_keys = true;
  static constexpr int shared_keys = Problem::row_tiles > Policy::waves ? 16 : 32;  // or registers do not last
  using Qk = QkFp8ToBf16<Problem>;
  using Pv = PvFp8ToBf16<Policy>;
};

template <class Problem, class Policy>
struct Fp8Mma<Problem, Policy, mla::fp8, mla::bf16> : Fp8Mma<Problem, Policy, mla::bf16, mla::bf16> {
  static constexpr int shared_keys = 32;
  using Qk = QkFp8<Problem>;
};

template <class Problem, class Policy>
struct Fp8Mma<Problem, Policy, mla::fp8, mla::fp8> {
  static constexpr bool splits_keys = false;
  static constexpr int shared_keys = 32;
  using Qk = QkFp8<Problem>;
  using Pv = PvFp8<Policy>;
};

// More than one row tile: the waves share stages of keys in LDS and split the rows.
template <class Problem, class Policy, class Mma, bool one_row_tile = Problem::row_tiles == 1>
struct DecodeTraits {
  using Producer = KvStageProducer<Problem, Policy, Mma::shared_keys>;
  using Mainloop = RowSplitMainloop<Problem, Policy, Mma, RowSplitFragments>;
};

// One row tile: every wave holds it and the waves split the keys.
template <class Problem, class Policy, class Mma>
struct DecodeTraits<Problem, Policy, Mma, true> {
  using Producer = RegisterProducer<Problem, Policy>;
  using Mainloop = KeySplitMainloop<Problem, Policy, Mma>;
};

template <class Problem, class Policy, class Mma>
using Decode =
    DecodeKernel<Problem, Policy, TileScheduler<DecodeSequences>, typename DecodeTraits<Problem, Policy, Mma>::Producer,
                 typename DecodeTraits<Problem, Policy, Mma>::Mainloop, DecodeEpilogue<Problem, Policy>>;

}  // namespace cdna::mfma_16x16x16
