// Sparse decode on gfx950. Macros of an instance: LAYOUT as below, ROWS 16 to 128.
#include "cdna/sparse_decode/mainloop_qk.hpp"
#include "gfx950/sparse_policy.hpp"

namespace {
using Policy = gfx950::SparsePolicy;
using dsv4 = cdna::Dsv4Format<Policy>;
using v32 = cdna::V32Format<Policy, cdna::ScaleDequant>;
using v32pow2 = cdna::V32Format<Policy, cdna::Pow2Dequant>;
using bf16x512 = cdna::Bf16Format<512>;
using bf16x576 = cdna::Bf16Format<576>;
using Decode = cdna::SparseDecode<Policy, LAYOUT, cdna::WavePartition<ROWS / 16>>;
}  // namespace

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::SparseDecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
