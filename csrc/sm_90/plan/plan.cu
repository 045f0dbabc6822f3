// plan on sm_90: the entry. STEP is search, balanced or uniform, WAVES the warps of a block.
#include "sm_90/wave.hpp"
#include "common/plan.hpp"

namespace {
using Kernel = mla::Plan<mla::sm_90::Wave, WAVES, true>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::PlanParams p) { Kernel::STEP(p); }
