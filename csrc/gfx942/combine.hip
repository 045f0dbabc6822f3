// combine on gfx942. Macros of an instance: D_V columns of a row, ROWS rows and WAVES waves of a workgroup, VEC columns
// of a lane's load, SLICES workgroups that share the columns of a row; SPLITS, where it is defined, the number of splits
// of every sequence.
#include "cdna/common/wave.hpp"
#include "common/combine_fixed_splits.hpp"

namespace {
struct Shape {
  static constexpr int head_dim_v = D_V, rows = ROWS, vec = VEC, waves = WAVES, slices = SLICES;
};
#ifdef SPLITS
using Kernel = mla::FixedSplitsCombine<cdna::Wave<false>, Shape, SPLITS>;
#else
using Kernel = mla::Combine<cdna::Wave<false>, Shape>;
#endif
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
