// append_kv on gfx950, for every KV format. Macro of an instance: TOKENS, the tokens of a workgroup.
#include "cdna/common/wave.hpp"
#include "common/append_kv.hpp"

namespace {
using Kernel = mla::AppendKv<cdna::Wave<true>, TOKENS>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::AppendKvParams p) { Kernel::run(p); }
