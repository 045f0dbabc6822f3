// combine on sm_90: the entry. A block has ROWS rows and WAVES warps; a lane loads VEC of the D_V columns at a time;
// SLICES blocks share the columns of a row.
#include "sm_90/wave.hpp"
#include "common/combine.hpp"

namespace {
struct Shape {
  static constexpr int head_dim_v = D_V, rows = ROWS, vec = VEC, waves = WAVES, slices = SLICES;
};
using Kernel = mla::Combine<mla::sm_90::Wave, Shape>;
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
