// combine on this arch. D_V columns, ROWS rows and WAVES waves per workgroup, VEC columns per lane and load; SLICES
// workgroups share the columns of a row.
#include "cdna/common/wave.hpp"
#include "common/combine.hpp"

namespace {
struct Shape {
  static constexpr int head_dim_v = D_V, rows = ROWS, vec = VEC, waves = WAVES, slices = SLICES;
};
using Kernel = mla::Combine<cdna::Wave<false>, Shape>;
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
