// Dense decode on gfx942. Macros of an instance: DTYPE bf16 or fp16, ROWS 16 to 128, WIDTH 576 or 512, ROTATE 0 or 1.
#include "cdna/decode_key_split.hpp"
#include "cdna/decode_row_split.hpp"
#include "gfx942/policy.hpp"

namespace {
using Problem = mla::DecodeProblem<mla::SameAsQuery<mla::DTYPE>, ROWS, WIDTH, ROTATE>;

template <class Problem, bool one_tile>
struct Pipeline {
  using Decode = cdna::KeySplitDecode<gfx942::Policy, Problem>;
};
template <class Problem>
struct Pipeline<Problem, false> {
  using Decode = cdna::RowSplitDecode<gfx942::Policy, Problem>;
};
using Decode = Pipeline<Problem, Problem::row_tiles == 1>::Decode;
}  // namespace

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::DecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
