// append_kv on this arch, for every layout, TOKENS to a workgroup.
#include "sm_90/wave.hpp"
#include "mla/append_kv.hpp"

namespace {
using Kernel = mla::AppendKv<sm_90::Wave, TOKENS>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::AppendKvParams p) { Kernel::run(p); }
