// Decode on sm_90: the entry. Roles and reasons are in README.md.
#include "sm_90/block.hpp"

namespace mla::sm90 {

using Policy = DecodePolicy<DTYPE, D_QK, Source::KV_SOURCE, Exchange::EXCHANGE>;

struct alignas(64) Launch {
  Params params;
};
static_assert(sizeof(Launch) == sizeof(Params), "the driver copies as many bytes as the host packs");

}  // namespace mla::sm90

// The attribute by EXCHANGE.
#define MLA_CLUSTER_none
#define MLA_CLUSTER_results __cluster_dims__(1, 2)
#define MLA_CLUSTER_probabilities __cluster_dims__(1, 2)
#define MLA_JOINED(a, b) a##b
#define MLA_CLUSTER_OF(exchange) MLA_JOINED(MLA_CLUSTER_, exchange)

extern "C" __global__ void MLA_CLUSTER_OF(EXCHANGE) __launch_bounds__(mla::sm90::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm90::Launch launch) {
  using namespace mla::sm90;
  run_block<Policy, Loader<Policy>>(launch.params);
}
