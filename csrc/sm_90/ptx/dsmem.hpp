// Distributed shared memory of a cluster: what a CTA does in the shared memory of one other, its peer.
//
// Waiting on an mbarrier for the peer, and arriving on one of the peer's, have the scope of the CTA, not of the
// cluster. For cluster scope the compiler adds a fence of global memory and invalidates L1 at every turn of the ring.
// The data handed over here is shared memory, which is in no cache: what an arrival announces was read or stored before
// it.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// This CTA's number in its cluster: 0 or 1, or of four CTAs, whose numbers count along the grid's first dimension first, up
// to 3.
MLA_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The cluster address of the peer's copy of a shared-memory address. Two CTAs that are APART have numbers which differ by as
// many: 1 in a cluster of two, and along the first dimension of one of four, in whose second dimension it is 2.
template <int APART = 1>
MLA_DEVICE uint32_t map_to_peer(uint32_t address) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cluster_rank() ^ APART));
  return there;
}

// One arrival, by lanes with `active` true, on a peer's mbarrier, given by its cluster address.
MLA_DEVICE void peer_mbarrier_arrive(uint32_t barrier, bool active) {
  asm volatile(
      "{\n.reg .pred does;\nsetp.ne.b32 does, %1, 0;\n@does mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(
          barrier),
      "r"(static_cast<int>(active))
      : "memory");
}

// Copies shared memory of this CTA to the peer's, by the copy engine. The bytes count on the peer's mbarrier.
MLA_DEVICE void peer_copy(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Stores 4 bytes to the peer's shared memory. They count on the peer's mbarrier.
MLA_DEVICE void peer_store_async(uint32_t to, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(value),
               "r"(barrier)
               : "memory");
}

// All threads of all CTAs meet. The form is not `.aligned`, because nothing guarantees that a warp is converged.
MLA_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

}  // namespace mla::sm_90
