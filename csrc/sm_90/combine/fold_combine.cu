// The combine that folds splits to nodes: the entry. Its constants are those of combine.cu.
#include "sm_90/combine/fold_combine.hpp"

namespace {
struct Shape {
  static constexpr int head_dim_v = D_V, rows = ROWS, vec = VEC, waves = WAVES, slices = SLICES;
};
using Kernel = mla::sm_90::FoldCombine<Shape>;
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
