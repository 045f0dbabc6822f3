// Two blocks of a cluster that bring each other keys, results or probabilities: what one does in the other's shared
// memory.
#pragma once

#include "sm_90/mbarrier.hpp"
#include "sm_90/policy.hpp"

namespace mla::sm90 {

// This block's number in its cluster, 0 or 1.
MLA_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where the other block has what this one has at an address of shared memory.
MLA_DEVICE uint32_t at_peer(uint32_t address) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cluster_rank() ^ 1));
  return there;
}

// Waiting on a barrier for the other block, and arriving on one of its, have the block's scope, not the cluster's: for
// the cluster's the compiler adds a fence of global memory and drops what L1 holds, at every turn of the ring. What is
// handed over is shared memory, which is in no cache: what an arrival announces was read or stored there before it
// came.

// One arrival of a lane that `does` on a barrier of the other block, by its address there.
MLA_DEVICE void peer_arrive(uint32_t there, bool does) {
  asm volatile(
      "{\n.reg .pred does;\nsetp.ne.b32 does, %1, 0;\n@does mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(
          there),
      "r"(static_cast<int>(does))
      : "memory");
}

// To the other block's shared memory from this one's, by the copy engine, or 4 bytes. They count on a barrier of that
// block when they are there.
MLA_DEVICE void peer_copy(uint32_t there, uint32_t from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
MLA_DEVICE void peer_store4(uint32_t there, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
               "r"(value), "r"(barrier)
               : "memory");
}

// Before any role begins: the barriers of this block, and of a pair, are there, fenced by whoever made them. Not the
// aligned form: nothing says that the lanes of a warp come together.
//
// A pair does not meet again, for that would fence global memory, too. Each block ends when it has waited for all that
// the other does in its shared memory, and reads of it.
template <class Policy>
MLA_DEVICE void blocks_meet() {
  if constexpr (Policy::EXCHANGE != Exchange::none)
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
  else
    block_sync();
}

// This lane is done with what a barrier guards, and so is its warp, which has met. Of a pair the warp arrives there,
// too: once, for the way is long, and first, for it takes longer.
template <class Policy>
MLA_DEVICE void warp_release(uint32_t barrier) {
  if constexpr (Policy::PAIRED) peer_arrive(at_peer(barrier), group_thread() % 32 == 0);
  barrier_arrive(barrier);
}

}  // namespace mla::sm90
