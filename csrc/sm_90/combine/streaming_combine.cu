// combine beside a decode that still runs, on sm_90: the entry. WAVES warps share the splits of a row, SLICES blocks
// its columns; decode stores RUNS runs of columns at the same time.
#include "sm_90/combine/streaming_combine.hpp"

namespace {
struct Shape {
  static constexpr int head_dim_v = D_V, rows = 1, vec = 4, waves = WAVES, slices = SLICES, runs = RUNS;
};
using Kernel = mla::sm_90::StreamingCombine<Shape>;
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
