// append_kv on this arch, for every layout, TOKENS to a workgroup.
#include "cdna/common/wave.hpp"
#include "common/append_kv.hpp"

namespace {
using Kernel = mla::AppendKv<cdna::Wave<false>, TOKENS>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::AppendKvParams p) { Kernel::run(p); }
