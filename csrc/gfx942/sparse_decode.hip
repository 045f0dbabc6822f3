// Sparse decode on gfx942. Macros of an instance: KV_FORMAT as below, ROWS 16, 32 or 64 (bf16: 16 or 64).
#include "cdna/sparse_decode/mfma_16x16x16/traits.hpp"
#include "cdna/sparse_decode/v41_format.hpp"
#include "gfx942/sparse_policy.hpp"

namespace {
namespace sparse = cdna::sparse;
using dsv4 = sparse::Dsv4Format<gfx942::OcpDequant<gfx942::Exact>>;
using dsv4fnuz = sparse::Dsv4Format<gfx942::FnuzDequant<gfx942::Exact>>;
using v32 = sparse::V32Format<gfx942::OcpDequant<gfx942::ToNearestEven>>;
using v32nope = sparse::V32Format<gfx942::OcpDequant<gfx942::ToNearestEven>, 0>;
using v41 = sparse::V41Format<gfx942::OcpDequant<gfx942::Exact>>;
using v41any = sparse::V41AnyFormat<gfx942::OcpDequant<gfx942::Exact>, gfx942::Fp4Dequant>;
using fp8x512 = sparse::Fp8Format<gfx942::FnuzDequant<gfx942::Exact>, 512>;
using fp8x576 = sparse::Fp8Format<gfx942::FnuzDequant<gfx942::Exact>, 576>;
using bf16x512 = sparse::Bf16Format<512>;
using bf16x576 = sparse::Bf16Format<576>;
using Decode = sparse::mfma_16x16x16::Decode<sparse::SparseProblem<KV_FORMAT, ROWS>, gfx942::SparsePolicy>;
}  // namespace

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::SparseDecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
