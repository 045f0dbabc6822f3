// ClusterShareAndReduce: four CTAs, two row tiles of a sequence with two KV splits each. CTAs of one split share its keys,
// as with ClusterShareKv, and CTAs of one row tile merge O, as with ClusterReduceO.
#pragma once

#include "sm_90/decode/cluster/reduce_o.hpp"
#include "sm_90/decode/cluster/share_kv.hpp"

namespace mla::sm_90 {

struct ClusterShareAndReduce : ClusterReduceO {
  static constexpr bool SHARES_KV = true;
  static constexpr int SPLITS_APART = 2;
  static constexpr int KV_EMPTY_ARRIVALS = ClusterShareKv::KV_EMPTY_ARRIVALS;

  MLA_DEVICE static uint32_t sharing_rank() { return cluster_rank() % 2; }
  MLA_DEVICE static void release_at_peer(uint32_t barrier) { ClusterShareKv::release_at_peer(barrier); }

  // As that of ClusterReduceO. Before the ring holds what the peer of the other split sends, the peer of this split must
  // have read all keys, which have then been copied to it from the ring.
  template <class Pv>
  MLA_DEVICE static void finish_tile(Pv& pv, int command) {
    const OutputTarget target = find_only_rows(pv.params_, pv.epilogue_);
    if (command & MULTIPLY) {
      pv.multiply(command, [] {});
      pv.wait_for_product();
      pv.release_kv();
    }
    pv.wait_for_readers();
    ReduceO<typename Pv::Traits>(pv.params_, pv.shared_, pv.group_).merge(pv.o_, target);
  }
};

}  // namespace mla::sm_90
