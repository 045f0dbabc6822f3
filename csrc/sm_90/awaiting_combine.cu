// combine beside a decode that still runs. WAVES warps share the splits of a row, SLICES workgroups its columns, of
// which decode stores RUNS at the same time.
#include "sm_90/awaiting_combine.hpp"

namespace {
struct Shape {
  static constexpr int head_dim_v = D_V, rows = 1, vec = 4, waves = WAVES, slices = SLICES, runs = RUNS;
};
using Kernel = mla::sm90::AwaitingCombine<Shape>;
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
