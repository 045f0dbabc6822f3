// ClusterReduceLast: the two CTAs of a cluster walk neighbouring SM parts of a plan towards each other. Where these
// meet within a sequence, the CTAs merge their last work tiles as ClusterReduceO does (plan_pair.hpp); all other tiles
// go to memory as without a cluster.
#pragma once

#include "sm_90/decode/cluster/reduce_o.hpp"

namespace mla::sm_90 {

struct ClusterReduceLast : ClusterReduceO {
  static constexpr bool MERGES_SPLITS = false;
  static constexpr bool MERGES_LAST = true;

  // The end of a PV warpgroup's last work tile, whose last product may still run.
  template <class Pv>
  MLA_DEVICE static void finish_last(Pv& pv) {
    const OutputTarget target = pv.find_rows();
    pv.wait_for_product();
    fence_proxy_async();  // the peer's copies come to where results of earlier tiles were
    ReduceO<typename Pv::Traits>(pv.params_, pv.shared_, pv.group_).merge(pv.o_, target);
  }
};

}  // namespace mla::sm_90
