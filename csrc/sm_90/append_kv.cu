// append_kv on this arch, for every layout, TOKENS to a workgroup.
#include "sm_90/append_one.hpp"
#include "sm_90/append_rows.hpp"

namespace {
using Kernel = mla::AppendKv<sm_90::Wave, TOKENS>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::AppendKvParams p) {
  if (!sm_90::AppendRowFits::all(p))
    Kernel::run(p);
  else if constexpr (TOKENS == 1)
    sm_90::with_append_row(p, [&](auto row) { sm_90::AppendOne::run(p, row); });
  else
    sm_90::AppendRows::run(p);
}
