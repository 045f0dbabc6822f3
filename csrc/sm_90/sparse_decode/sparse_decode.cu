// Sparse decode on sm_90: the entry. KV_FORMAT is a type of kv_format.hpp, CLUSTER_MODE what the two CTAs of a cluster
// share (decode/cluster/none.hpp), and MAX_LOGITS whether the largest scores are returned. README.md describes the
// producers; the other roles are those of decode.
#include "sm_90/decode/cluster/modes.hpp"
#include "sm_90/decode/kernel.hpp"
#include "sm_90/sparse_decode/producer_dequant.hpp"
#include "sm_90/sparse_decode/producer_gather.hpp"

#ifndef MAX_LOGITS
#define MAX_LOGITS 0
#endif

namespace mla::sm_90 {

using Policy = SparseDecodePolicy<KV_FORMAT, cluster_mode::CLUSTER_MODE>;
using Traits = SparseDecodeTraits<SparseDecodeProblem<KV_FORMAT, MAX_LOGITS != 0>, Policy>;

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

extern "C" __global__ void MLA_CLUSTER_OF(CLUSTER_MODE) __launch_bounds__(mla::sm_90::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::Kernel::run(launch.params);
}
