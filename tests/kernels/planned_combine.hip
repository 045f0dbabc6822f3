// planned_combine, which only sm_90 is given, for a GPU that can be emulated; as if that held 48 waves.
#include "cdna/common/wave.hpp"
#include "common/planned_combine.hpp"

using Kernel = mla::PlannedCombine<cdna::Wave<false>, 512, 4, 2, 48>;

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void planned_combine(mla::CombineParams p) { Kernel::run(p); }
