// Distributed shared memory on a CPU. Copies, stores and arrivals at a peer come when the scheduler lets them. Copies read
// their source only then, so that one which is overwritten too early is found.
#pragma once

#include "sm_90/ptx/tma.hpp"

namespace mla::sm_90 {

inline uint32_t cluster_rank() { return current_block; }

template <int APART = 1>
uint32_t map_to_peer(uint32_t address) {
  if (CLUSTER_BLOCKS == 1) fail("no cluster", 0);
  return in_block(current_block ^ APART, address);
}
// PTX promises no order of arrivals at a peer: one may come before those that its block sent earlier. The block may be
// stopped behind it, as in a process that another one interrupts.
inline void peer_mbarrier_arrive(uint32_t barrier, bool active) {
  if (active) bulk_copies.push_back({{}, barrier, 0});
  if (HOST_STOPS == 0) return;
  __syncwarp();
  sent_to_peer = current_block;
  yield();
}
inline void peer_store_async(uint32_t to, uint32_t value, uint32_t barrier) {
  bulk_copies.push_back({{{to, nullptr, 4, value}}, barrier, 4});
}
inline void peer_copy(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  bulk_copies.push_back({{{to, nullptr, bytes, 0, of_cluster(from)}}, barrier, bytes});
}
inline void cluster_sync() {
  static int count = 0;
  static long number = 0;
  meet_all(count, number, CLUSTER_BLOCKS * BLOCK_THREADS);
}

}  // namespace mla::sm_90
