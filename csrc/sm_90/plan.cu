// plan on this arch: STEP is search, balanced or uniform.
#include "sm_90/wave.hpp"
#include "common/plan.hpp"

namespace {
using Kernel = mla::Plan<sm_90::Wave, WAVES>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::PlanParams p) { Kernel::STEP(p); }
