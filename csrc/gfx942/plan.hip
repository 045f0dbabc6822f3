// plan on gfx942. Macros of an instance: STEP (search, balanced or uniform) and WAVES of the workgroup.
#include "cdna/common/wave.hpp"
#include "common/plan.hpp"

namespace {
using Kernel = mla::Plan<cdna::Wave<false>, WAVES, false, true>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::PlanParams p) { Kernel::STEP(p); }
