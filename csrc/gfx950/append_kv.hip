// append_kv on gfx950, for every KV format. Macros of an instance: TOKENS, the tokens of a workgroup; ONE_RUN.
#include "cdna/common/wave.hpp"
#include "common/append_kv.hpp"

#ifndef ONE_RUN
#define ONE_RUN 0
#endif

namespace {
using Kernel = mla::AppendKv<cdna::Wave<true>, TOKENS, ONE_RUN>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::AppendKvParams p) { Kernel::run(p); }
