// append_kv on sm_90, for every KV format: the entry. A block writes up to TOKENS tokens.
#include "sm_90/append_kv/append_bulk.hpp"
#include "sm_90/append_kv/append_single.hpp"

namespace {
using Kernel = mla::AppendKv<mla::sm_90::Wave, TOKENS>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::AppendKvParams p) {
  using namespace mla::sm_90;
  if (!PlainRowFits::all(p))
    Kernel::run(p);
  else if constexpr (TOKENS == 1)
    with_row_of<PlainRow>(p, [&](auto row) { AppendSingle::run(p, row); });
  else
    AppendBulk::run(p);
}
