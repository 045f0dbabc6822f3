// combine on sm_90: the entry. A block has ROWS rows and WAVES warps; a lane loads VEC of the D_V columns at a time;
// SLICES blocks share the columns of a row.
#include "sm_90/combine/merged_rows.hpp"

namespace {
struct Shape {
  static constexpr int head_dim_v = D_V, rows = ROWS, vec = VEC, waves = WAVES, slices = SLICES;
};
using Kernel = mla::Combine<mla::sm_90::Wave, Shape>;
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) {
  // Apart, because a look at the log-sum-exps before partials are loaded takes another round trip to L2.
  if (p.skip_none == mla::sm_90::MergedRows::MAY_BE_MERGED)
    mla::sm_90::MergedRows::run<Kernel>(p);
  else
    Kernel::run(p);
}
