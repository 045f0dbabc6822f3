// The named hardware barriers of a decode block, all in one list. Number 0 belongs to __syncthreads.
#pragma once

namespace mla::sm_90 {

enum NamedBarrier : int {
  QK_BARRIER = 1,             // the 128 threads of the QK warpgroup
  PRODUCER_BARRIER = 2,       // the two producer warps that issue TMA loads: of keys, and of queries
  PV_BARRIER = 3,             // the 256 threads of both PV warpgroups
  PV_GROUP_BARRIER = 4,       // and 5: the 128 threads of either PV warpgroup (ClusterExchangeP)
  SENTINEL_FILL_BARRIER = 6,  // the producer warp of keys and the warp that fills partials (sentinel_fill.hpp)
  // Sparse decode has no ClusterExchangeP, so 4 and 5 are free there: two producer warps whose keys are sent together.
  PEER_SEND_BARRIER = PV_GROUP_BARRIER,
};

}  // namespace mla::sm_90
