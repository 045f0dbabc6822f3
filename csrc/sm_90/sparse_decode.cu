// Sparse decode on sm_90: the entry. LAYOUT is a record of sparse_policy.hpp. Roles and reasons are in README.md.
#include "sm_90/block.hpp"
#include "sm_90/sparse_loader.hpp"

namespace mla::sm90 {

using Policy = SparsePolicy<LAYOUT>;

struct alignas(64) Launch {
  Policy::Params params;
};
static_assert(sizeof(Launch) == sizeof(Policy::Params), "the driver copies as many bytes as the host packs");

}  // namespace mla::sm90

extern "C" __global__ void __launch_bounds__(mla::sm90::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm90::Launch launch) {
  using namespace mla::sm90;
  run_block<Policy, SparseLoader<Policy>>(launch.params);
}
