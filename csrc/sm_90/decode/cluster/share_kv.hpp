// ClusterShareKv: the two CTAs of a cluster hold two row tiles of a sequence, of which both read all keys. Either each
// loads one of the two boxes of each KV stage for both (producer_tma.hpp), or it dequantises half of each for both
// (sparse_decode/producer_dequant.hpp). Their rings advance in step.
#pragma once

#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/ptx/dsmem.hpp"

namespace mla::sm_90 {

struct ClusterShareKv : ClusterMode {
  static constexpr bool SHARES_KV = true;
  static constexpr bool LATE_EPILOGUE = true;
  static constexpr int KV_EMPTY_ARRIVALS = 256 + 8;  // the PV warpgroups, and the peer's PV warps

  MLA_DEVICE static void sync() { cluster_sync(); }
  MLA_DEVICE static void release_at_peer(uint32_t barrier) {
    peer_mbarrier_arrive(map_to_peer(barrier), warpgroup_thread() % 32 == 0);
  }
};

}  // namespace mla::sm_90
