// combine behind a decode with a plan, on sm_90: the entry. A block has WAVES warps; SLICES blocks share the D_V
// columns of a row that has many splits; the device holds RESIDENT warps.
#include "common/persistent_combine.hpp"
#include "sm_90/combine/merged_rows.hpp"

namespace {
using Kernel = mla::PersistentCombine<mla::sm_90::Wave, D_V, WAVES, SLICES, RESIDENT, mla::sm_90::MergedRows>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
