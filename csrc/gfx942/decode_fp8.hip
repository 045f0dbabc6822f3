// Dense decode on gfx942 from a cache of FNUZ e4m3. Macros of an instance: QUERY bf16 or fp8, WEIGHT (the type of P)
// bf16 or, with fp8 queries, fp8, ROWS 16 to 128.
#include "cdna/decode/mfma_16x16x16/traits.hpp"
#include "gfx942/policy.hpp"

using Problem = mla::DecodeProblem<mla::Fp8Cache<mla::QUERY>, ROWS, mla::LATENT + mla::ROPE, false>;
using Mma = cdna::mfma_16x16x16::Fp8Mma<Problem, gfx942::Policy, mla::QUERY, mla::WEIGHT>;
using Decode = cdna::mfma_16x16x16::Decode<Problem, gfx942::Policy, Mma>;

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::DecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
