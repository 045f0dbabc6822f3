// Dense decode on gfx950 from a cache of OCP e4m3. Macros of an instance: QUERY bf16 or fp8, WEIGHT (the type of P)
// bf16 or, with fp8 queries, fp8, ROWS 16 to 128.
#include "cdna/decode/mfma_16x16x32/traits.hpp"
#include "gfx950/policy.hpp"

using Policy = gfx950::Policy;
using Problem = mla::DecodeProblem<mla::Fp8Cache<mla::QUERY>, ROWS, mla::LATENT + mla::ROPE, false>;
using Mma = cdna::mfma_16x16x32::Fp8Mma<Problem, Policy, mla::QUERY, mla::WEIGHT>;
using Decode = cdna::mfma_16x16x32::Decode<Problem, Policy, Mma>;

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::DecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
