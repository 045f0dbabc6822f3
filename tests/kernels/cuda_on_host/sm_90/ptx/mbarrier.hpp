// mbarriers and named barriers on a CPU.
#pragma once

#include <map>

#include "common/device.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/spin_limit.hpp"

namespace mla::sm_90 {

struct Mbarrier {
  int arrivals;
  int pending;
  long bytes = 0;  // announced and not yet copied; negative where copies came first
  uint32_t phase = 0;
  uint32_t arrived[CLUSTER_BLOCKS * BLOCK_THREADS] = {};                    // how often each thread has
  std::vector<uint32_t> phases_of_warps[CLUSTER_BLOCKS * BLOCK_THREADS / 32];  // in which its warp did so

  void settle() {
    if (pending != 0 || bytes != 0) return;
    phase ^= 1;
    pending = arrivals;
    ++events;
  }

  // A warp's lanes arrive at once. Hardware takes more arrivals than the phase waits for as an illegal instruction, where
  // lanes one by one would have been the first of the next phase. That can be where a phase waits for a peer's, too.
  void arrive_with_warp(uint32_t barrier) {
    if (CLUSTER_BLOCKS == 1 || arrivals % 32 == 0) return;
    const int thread = current_block * BLOCK_THREADS + current;
    std::vector<uint32_t>& phases = phases_of_warps[thread / 32];
    const uint32_t number = arrived[thread]++;
    if (number == phases.size()) phases.push_back(phase);
    if (phases[number] != phase) fail("more arrivals of a warp than the phase waits for at", barrier);
  }
};
inline std::map<uint32_t, Mbarrier> mbarriers;  // by their addresses in the cluster

inline Mbarrier& mbarrier_at(uint32_t address) {
  shared_at(address, 8);
  const auto found = mbarriers.find(of_cluster(address));
  if (found == mbarriers.end()) fail("no mbarrier at", address);
  return found->second;
}
inline void mbarrier_init(uint32_t barrier, int arrivals) { mbarriers[of_cluster(barrier)] = {arrivals, arrivals}; }
inline void settle_arrival(Mbarrier& at, uint32_t barrier) {
  if (at.pending == 0) fail("one arrival too many at", barrier);
  --at.pending;
  at.settle();
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  Mbarrier& at = mbarrier_at(barrier);
  at.arrive_with_warp(barrier);
  settle_arrival(at, barrier);
}
inline void mbarrier_expect_tx(uint32_t barrier, int bytes) {
  mbarrier_at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}
inline void mbarrier_expect_more(uint32_t barrier, int bytes) {
  Mbarrier& at = mbarrier_at(barrier);
  if (at.pending == 0) fail("bytes of a complete phase at", barrier);
  at.bytes += bytes;
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity, WaitSite site = WaitSite::here()) {
  SpinLimit limit("an mbarrier's phase is complete", site);
  while (mbarrier_at(barrier).phase == parity && limit.again()) yield();
}
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) { return mbarrier_at(barrier).phase != parity; }
inline void fence_proxy_async() {}

struct NamedBarrierState {
  int count = 0;
  long number = 0;
  bool any[2] = {};
};
inline OfEachBlock<NamedBarrierState, 16> named_barriers;

inline bool at_named_barrier(int id, int threads, bool any) {
  NamedBarrierState& barrier = named_barriers[id];
  const long number = barrier.number;
  barrier.any[number % 2] |= any;
  if (++barrier.count == threads) {
    barrier.count = 0;
    ++barrier.number;
    barrier.any[barrier.number % 2] = false;
    ++events;
  } else {
    yield_until_changed(barrier.number);
  }
  return barrier.any[number % 2];
}
template <int ID, int THREADS>
void named_barrier_sync() {
  at_named_barrier(ID, THREADS, false);
}
template <int THREADS>
void named_barrier_sync(int id) {
  at_named_barrier(id, THREADS, false);
}
template <int ID, int THREADS>
void named_barrier_arrive() {
  NamedBarrierState& barrier = named_barriers[ID];
  if (++barrier.count == THREADS) {
    barrier.count = 0;
    ++barrier.number;
    ++events;
  }
}
template <int ID, int THREADS>
bool named_barrier_any(bool any) {
  return at_named_barrier(ID, THREADS, any);
}
template <int THREADS>
bool named_barrier_any(int id, bool any) {
  return at_named_barrier(id, THREADS, any);
}

}  // namespace mla::sm_90
