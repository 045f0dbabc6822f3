// Dense decode on gfx950 from a cache of OCP e4m3. Macros of an instance: QUERY bf16 or fp8, WEIGHT bf16 or, with fp8
// queries, fp8, ROWS 16 to 128.
#include "cdna/decode/mfma_16x16x32/traits.hpp"
#include "gfx950/policy.hpp"

using Problem = mla::DecodeProblem<mla::Fp8Cache<mla::QUERY>, ROWS, mla::LATENT + mla::ROPE, false>;
using Decode =
    cdna::WideDecode<gfx950::Policy, Problem, cdna::Fp8Arithmetic<gfx950::Policy, Problem, mla::QUERY, mla::WEIGHT>>;

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::DecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
