// The persistent combine, which only sm_90 uses, for a GPU that can be emulated and as if it held 48 waves.
#include "cdna/common/wave.hpp"
#include "common/persistent_combine.hpp"

using Kernel = mla::PersistentCombine<cdna::Wave<false>, 512, 4, 2, 48>;

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void persistent_combine(mla::CombineParams p) { Kernel::run(p); }
