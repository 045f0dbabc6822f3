// Dense decode on gfx942. Macros of an instance: DTYPE bf16 or fp16, ROWS 16 to 128, WIDTH 576 or 512, ROTATE 0 or 1.
#include "cdna/decode/mfma_16x16x16/traits.hpp"
#include "gfx942/policy.hpp"

using Problem = mla::DecodeProblem<mla::SameAsQuery<mla::DTYPE>, ROWS, WIDTH, ROTATE>;
using Decode = cdna::mfma_16x16x16::Decode<Problem, gfx942::Policy>;

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::DecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
