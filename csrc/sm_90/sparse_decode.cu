// Sparse decode on sm_90: the entry. LAYOUT is a record of sparse_policy.hpp, CLUSTER how many blocks bring keys
// together. Roles and reasons are in sparse_decode.md.
#include "sm_90/block.hpp"
#include "sm_90/sparse_loader.hpp"

namespace mla::sm90 {

using Policy = SparsePolicy<LAYOUT, CLUSTER>;

struct alignas(64) Launch {
  Policy::Params params;
};
static_assert(sizeof(Launch) == sizeof(Policy::Params), "the driver copies as many bytes as the host packs");

}  // namespace mla::sm90

#if CLUSTER > 1
#define MLA_CLUSTER __cluster_dims__(CLUSTER)
#else
#define MLA_CLUSTER
#endif

extern "C" __global__ void MLA_CLUSTER __launch_bounds__(mla::sm90::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm90::Launch launch) {
  using namespace mla::sm90;
  run_block<Policy, SparseLoader<Policy>>(launch.params);
}
