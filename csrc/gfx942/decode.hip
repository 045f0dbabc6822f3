// Dense decode on gfx942. Macros of an instance: DTYPE bf16 or fp16, ROWS 16 to 128, WIDTH of a cached row, ROTATE 1 where
// its rope part is un-rotated, and D_V of latents that are not 512.
#include "cdna/decode/mfma_16x16x16/traits.hpp"
#include "gfx942/policy.hpp"

#ifndef ROTATE
#define ROTATE 0
#endif
#ifndef D_V
#define D_V 512
#endif

using Problem = mla::DecodeProblem<mla::SameAsQuery<mla::DTYPE>, ROWS, WIDTH, ROTATE, D_V>;
using Mma = cdna::mfma_16x16x16::SameTypeMma<Problem, gfx942::Policy>;
using Decode = cdna::mfma_16x16x16::Decode<Problem, gfx942::Policy, Mma>;

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::DecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
