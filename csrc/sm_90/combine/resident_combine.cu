// combine behind a decode with a plan, on sm_90: the entry. A block has WAVES warps, a row D_V columns.
#include "sm_90/combine/resident_combine.hpp"

namespace {
using Kernel = mla::sm_90::ResidentCombine<D_V, WAVES>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::CombineParams p) { Kernel::run(p); }
