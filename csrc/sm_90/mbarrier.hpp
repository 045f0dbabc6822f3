// Waiting without spinning on memory: mbarriers, register hand-over, and the copies that arrive on mbarriers.
#pragma once

#include "common/device.hpp"

namespace mla::sm90 {

MLA_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// This thread's number in its warpgroup, read anew at every use: the roles have no register to keep it in.
MLA_DEVICE int group_thread() {
  uint32_t thread;  // unsigned: remainders and quotients by powers of two are then single instructions
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread % 128);
}

MLA_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers that were just initialised visible to the copy engine.
MLA_DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// When a warp is done with what a barrier guards, each lane arrives for itself. One lane for its warp would do, but
// racecheck would not see what the others did before, and 32 arrivals take no longer.
MLA_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

MLA_DEVICE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

MLA_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwaiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni arrived;\nbra.uni waiting;\narrived:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase is already complete.
MLA_DEVICE bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Makes ordinary stores to shared memory, by this thread or visible to it, visible to wgmma and the copy engine.
MLA_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier of one warpgroup; 0 is the block's own.
MLA_DEVICE void group_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// For programmatic dependent launch: nothing that the previous kernel wrote may be read before this, and blocks of the
// next kernel may be scheduled once every block has passed it. Without such a launch it does nothing.
MLA_DEVICE void wait_for_turn() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
MLA_DEVICE void give_turn() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
MLA_DEVICE void take_turn() {
  wait_for_turn();
  give_turn();
}

template <int REGISTERS>
MLA_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
MLA_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// 16 bytes to shared memory, zeros when `valid` is false (nothing is read then).
MLA_DEVICE void copy16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// A box of the tensor that `map` describes, from these coordinates on, innermost first, to shared memory; its bytes
// count on the barrier.
MLA_DEVICE void copy_box(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
MLA_DEVICE void copy_box(uint32_t to, const void* map, int x, int y, int z, int w, uint32_t barrier, uint64_t keep) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(keep)
      : "memory");
}

// The same to the same place of both blocks of a cluster, and on the same barrier of each.
MLA_DEVICE void copy_box_to_both(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Prefetches such a box into L2. Coordinates outside the tensor bring nothing.
MLA_DEVICE void prefetch_box(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

// How long L2 keeps what is copied, encoded as `createpolicy` does it for a whole access.
constexpr uint64_t EVICT_NORMAL = 0x1000000000000000;
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;

// Prefetches the 128-byte line that holds an address from memory into L2.
MLA_DEVICE void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// The same into L1, for which there is no prefetch instruction: a load that nobody waits for.
MLA_DEVICE void load_line(const void* address) {
  asm volatile("{\n.reg .b32 word;\nld.global.ca.b32 word, [%0];\n}\n" ::"l"(address));
}

// Loads a word that the previous kernel may have written, at an address that is known before take_turn. `__ldg` and
// `ld.global.nc` will not do: they read data taken to be constant, and the assembler has moved them up before the wait.
// Where the address itself depends on a word loaded this way, they are fine.
MLA_DEVICE int load_word(const int32_t* address) {
  int value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Loads from L2 a word that others may be writing, bypassing L1 so that no stale copy stays there.
MLA_DEVICE int load_past_l1(const int32_t* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

MLA_DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// This thread arrives on the barrier once all its copies so far have landed. They are generic-proxy writes: whoever
// waits calls fence_async() before wgmma reads them.
MLA_DEVICE void copies_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace mla::sm90
