// Sparse decode on sm_90: the entry. KV_FORMAT is a type of kv_format.hpp, CLUSTER the number of CTAs that bring keys
// together. README.md describes the producers; the other roles are those of decode.
#include "sm_90/decode/kernel.hpp"
#include "sm_90/sparse_decode/producer_dequant.hpp"
#include "sm_90/sparse_decode/producer_gather.hpp"

namespace mla::sm_90 {

template <int SIZE>
struct ClusterOf {
  using Type = ClusterNone;
};
template <>
struct ClusterOf<2> {
  using Type = ClusterShareKv;
};
static_assert(CLUSTER == 1 || CLUSTER == 2, "sparse_decode: CLUSTER is 1 or 2");

using Policy = SparseDecodePolicy<KV_FORMAT, ClusterOf<CLUSTER>::Type>;
using Traits = SparseDecodeTraits<SparseDecodeProblem<KV_FORMAT>, Policy>;

template <bool NEEDS_DEQUANT>
struct KernelOf {
  using Type = DecodeKernel<Traits, SparseTileScheduler, ProducerDequant>;
};
template <>
struct KernelOf<false> {
  using Type = DecodeKernel<Traits, SparseTileScheduler, ProducerGather>;
};
using Kernel = KernelOf<KV_FORMAT::NEEDS_DEQUANT>::Type;

}  // namespace mla::sm_90

#if CLUSTER > 1
#define MLA_CLUSTER __cluster_dims__(CLUSTER)
#else
#define MLA_CLUSTER
#endif

extern "C" __global__ void MLA_CLUSTER __launch_bounds__(mla::sm_90::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::Kernel::run(launch.params);
}
