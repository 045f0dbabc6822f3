// Sparse decode on gfx950. Macros of an instance: LAYOUT dsv4, v32, v32pow2 or bf16, WIDTH 576 or 512, ROWS 16 to 128 and
// ROWGROUPS, the waves that share them in the scores.
#include "cdna/sparse_decode.hpp"
#include "gfx950/sparse_policy.hpp"

namespace {
using Policy = gfx950::SparsePolicy;
using dsv4 = cdna::Dsv4Record<Policy>;
using v32 = cdna::V32Record<Policy, cdna::ByFactor>;
using v32pow2 = cdna::V32Record<Policy, cdna::ByPowerOfTwo>;
using bf16 = cdna::Bf16Record<WIDTH>;
using Record = LAYOUT;
static_assert(Record::qk_dim == WIDTH, "sparse_decode: this layout has rows of another width");
using Decode = cdna::SparseDecode<Policy, Record, cdna::SparseShape<ROWS / 16, ROWGROUPS>>;
}  // namespace

MLA_KERNEL(Decode::threads, 1) void MLA_SUITE_KERNEL(mla::SparseDecodeParams) {
  static MLA_SHARED __attribute__((aligned(1024))) char lds[Decode::lds_bytes];
  Decode::run((cdna::LdsBytes)lds);
}
