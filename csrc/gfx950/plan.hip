// plan on this arch: STEP is search, balanced or uniform.
#include "cdna/common/wave.hpp"
#include "common/plan.hpp"

namespace {
using Kernel = mla::Plan<cdna::Wave<true>, WAVES>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::PlanParams p) { Kernel::STEP(p); }
