// combine behind a planned decode on this arch: D_V columns, WAVES waves per workgroup; SLICES workgroups share the
// columns of a row whose splits are many; the device holds RESIDENT waves.
#include "common/planned_combine.hpp"
#include "sm_90/wave.hpp"

namespace {
using Kernel = mla::PlannedCombine<sm_90::Wave, D_V, WAVES, SLICES, RESIDENT>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
