// append_kv on sm_90 of bf16 rows into records that scale all 512 values of a row: the entry. FORMAT is a type of
// record_row.hpp. A block writes up to TOKENS tokens.
#include "sm_90/append_kv/append_bulk.hpp"
#include "sm_90/append_kv/append_by_warps.hpp"
#include "sm_90/append_kv/record_row.hpp"

namespace {
constexpr bool bulk = TOKENS > mla::sm_90::AppendByWarps::warps;
using Kernel = mla::AppendKv<mla::sm_90::Wave, bulk ? TOKENS : 1>;
template <int angle_bytes>
using Row = mla::sm_90::RecordRow<mla::sm_90::FORMAT, angle_bytes>;

template <class Body>
MLA_DEVICE void with_row(const mla::AppendKvParams& p, Body body) {
  if constexpr (mla::sm_90::FORMAT::ROTATES)
    mla::sm_90::with_row_of<Row>(p, body);
  else
    body(Row<0>(p));
}
}  // namespace

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::AppendKvParams p) {
  using namespace mla::sm_90;
  if constexpr (bulk) {
    MLA_SHARED AppendBulk::Shared<RecordPlace> shared;
    with_row(p, [&](auto row) { AppendBulk::write(p, shared, row); });
  } else {
    MLA_SHARED AppendByWarps::Shared shared;
    with_row(p, [&](auto row) { AppendByWarps::run(p, shared, row); });
  }
}
