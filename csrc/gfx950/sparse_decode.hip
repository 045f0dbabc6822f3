// Sparse decode on gfx950. Macros of an instance: KV_FORMAT as below, ROWS 16 to 128.
#include "cdna/sparse_decode/mfma_16x16x32/traits.hpp"
#include "cdna/sparse_decode/v41_format.hpp"
#include "gfx950/sparse_policy.hpp"

namespace {
namespace sparse = cdna::sparse;
using dsv4 = sparse::Dsv4Format<gfx950::Pow2Dequant>;
using v32 = sparse::V32Format<gfx950::ScaleDequant>;
using v32pow2 = sparse::V32Format<gfx950::Pow2Dequant>;
using v32nope = sparse::V32Format<gfx950::ScaleDequant, 0>;
using v41 = sparse::V41Format<gfx950::Pow2Dequant>;
using v41any = sparse::V41AnyFormat<gfx950::Pow2Dequant, gfx950::Fp4Dequant>;
using fp8x512 = sparse::Fp8Format<gfx950::Pow2Dequant, 512>;
using fp8x576 = sparse::Fp8Format<gfx950::Pow2Dequant, 576>;
using bf16x512 = sparse::Bf16Format<512>;
using bf16x576 = sparse::Bf16Format<576>;
using Decode = sparse::mfma_16x16x32::Decode<sparse::SparseProblem<KV_FORMAT, ROWS>, gfx950::Policy>;
}  // namespace

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::SparseDecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
