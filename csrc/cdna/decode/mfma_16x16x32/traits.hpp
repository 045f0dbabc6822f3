// The dense decode kernel of archs with 16x16x32 matrix instructions, transposed LDS reads and 16-byte copies to LDS
// (CDNA4): in which types a problem is multiplied, and which parts its kernel is made of.
#pragma once

#include "cdna/decode/epilogue.hpp"
#include "cdna/decode/kernel.hpp"
#include "cdna/decode/mainloop_row_split.hpp"
#include "cdna/decode/mfma_16x16x32/mainloop_key_split.hpp"
#include "cdna/decode/mfma_16x16x32/producer_lds_ring.hpp"
#include "cdna/decode/mfma_16x16x32/producer_registers.hpp"
#include "cdna/decode/mfma_16x16x32/row_split_fragments.hpp"

namespace cdna::mfma_16x16x32 {

// The types of both products and the keys of a tile: `shared_keys` where the waves share it, `private_keys` where each
// wave has its own. `splits_keys` says that up to four row tiles are worth splitting the waves over keys as well.

// 16-bit caches: every operand has the type of the cache. Narrow rows leave room for more keys, which their tails need:
// a wave copies 16 keys' at once.
template <class Problem, class Policy>
struct SameTypeMma {
  static constexpr bool splits_keys = false;
  static constexpr int shared_keys = Problem::latent == mla::LATENT ? 32 : 64;
  static constexpr int private_keys = 32;
  using Qk = QkSameType<Problem>;
  using SharedPv = PvSameType<Policy, typename Problem::Element>;
  using PrivatePv = SharedPv;
};

// fp8 caches, by the type of the queries and that of P.
template <class Problem, class Policy, class Query, class P>
struct Fp8Mma;

template <class Problem, class Policy>
struct Fp8Mma<Problem, Policy, mla::bf16, mla::bf16> {
  static constexpr bool splits_keys = true;
  static constexpr int shared_keys = 64;
  static constexpr int private_keys = 64;
  using Qk = QkFp8ToBf16<Problem, Policy>;
  using SharedPv = PvFp8ToBf16<Policy>;
  using PrivatePv = SharedPv;
};

template <class Problem, class Policy>
struct Fp8Mma<Problem, Policy, mla::fp8, mla::bf16> : Fp8Mma<Problem, Policy, mla::bf16, mla::bf16> {
  using Qk = QkFp8<Problem>;
};

// With one row tile the matrix unit has time to spare: a private tile is multiplied 32 keys at a time.
template <class Problem, class Policy>
struct Fp8Mma<Problem, Policy, mla::fp8, mla::fp8> {
  static constexpr bool splits_keys = false;
  static constexpr int shared_keys = 128;
  static constexpr int private_keys = 64;
  using Qk = QkFp8<Problem>;
  using SharedPv = PvFp8<Policy, 128>;
  using PrivatePv = PvFp8<Policy, 32>;
};

// More than one row tile: the waves share a ring of stages in LDS and split the rows.
template <class Problem, class Policy, class Mma, bool one_row_tile = Problem::row_tiles == 1>
struct DecodeTraits {
  using Producer = LdsRingProducer<Problem, Policy, Mma::shared_keys>;
  using Mainloop = RowSplitMainloop<Problem, Policy, Mma, RowSplitFragments>;
};

// One row tile: every wave holds it and the waves split the keys.
template <class Problem, class Policy, class Mma>
struct DecodeTraits<Problem, Policy, Mma, true> {
  using Producer = RegisterProducer<Problem, Policy, Mma::private_keys>;
  using Mainloop = KeySplitMainloop<Problem, Policy, Mma>;
};

template <class Problem, class Policy, class Mma>
using Decode =
    DecodeKernel<Problem, Policy, TileScheduler<DecodeSequences>, typename DecodeTraits<Problem, Policy, Mma>::Producer,
                 typename DecodeTraits<Problem, Policy, Mma>::Mainloop, DecodeEpilogue<Problem, Policy>>;

}  // namespace cdna::mfma_16x16x32
