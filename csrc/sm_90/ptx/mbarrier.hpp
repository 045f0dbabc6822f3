// mbarriers of this block's shared memory, named barriers, and the fence between the generic and the async proxy.
#pragma once

#include "common/device.hpp"
#include "sm_90/spin_limit.hpp"

namespace mla::sm_90 {

MLA_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes mbarriers that were just initialised visible to the async proxy and to the cluster.
MLA_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival. A warp that releases a buffer arrives with all 32 lanes: one lane would do, but racecheck would not see
// what the other lanes did before, and 32 arrivals take no longer.
MLA_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that also adds `bytes` to the transactions that the current phase waits for.
MLA_DEVICE void mbarrier_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Adds `bytes` to the transactions that the current phase waits for, on behalf of a thread that has yet to arrive.
MLA_DEVICE void mbarrier_expect_more(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase with this parity is complete. The thread may be suspended until it is, for a microsecond at most.
MLA_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, 1000;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Blocks until the phase with this parity is complete. Lanes of a warp may see that in different tries, so the branches
// are not `.uni`.
MLA_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity, WaitSite site = WaitSite::here()) {
#if defined(MLA_MAX_TRIES)
  SpinLimit limit("an mbarrier's phase is complete", site);
  while (!mbarrier_try_wait(barrier, parity)) limit.again();
#else
  asm volatile(
      "{\n.reg .pred done;\nwaiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra arrived;\nbra waiting;\narrived:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Whether the phase with this parity is already complete.
MLA_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Makes ordinary stores to shared memory, by this thread or visible to it, visible to wgmma and TMA.
MLA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Hardware barrier ID for THREADS threads (a multiple of 32): `sync` arrives and waits, `arrive` only arrives.
template <int ID, int THREADS>
MLA_DEVICE void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
template <int ID, int THREADS>
MLA_DEVICE void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
// The same for a number in a register.
template <int THREADS>
MLA_DEVICE void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Waits for THREADS threads at hardware barrier ID; whether `any` is true for one of them.
template <int ID, int THREADS>
MLA_DEVICE bool named_barrier_any(bool any) {
  uint32_t result;
  asm volatile(
      "{\n.reg .pred in, out;\nsetp.ne.b32 in, %1, 0;\nbarrier.cta.red.or.pred out, %2, %3, in;\n"
      "selp.u32 %0, 1, 0, out;\n}\n"
      : "=r"(result)
      : "r"(static_cast<int>(any)), "n"(ID), "n"(THREADS)
      : "memory");
  return result != 0;
}
// The same for a number in a register.
template <int THREADS>
MLA_DEVICE bool named_barrier_any(int id, bool any) {
  uint32_t result;
  asm volatile(
      "{\n.reg .pred in, out;\nsetp.ne.b32 in, %1, 0;\nbarrier.cta.red.or.pred out, %2, %3, in;\n"
      "selp.u32 %0, 1, 0, out;\n}\n"
      : "=r"(result)
      : "r"(static_cast<int>(any)), "r"(id), "n"(THREADS)
      : "memory");
  return result != 0;
}

}  // namespace mla::sm_90
