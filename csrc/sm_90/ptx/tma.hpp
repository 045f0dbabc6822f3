// TMA (the copy engine): boxes of tensors to shared memory, prefetches of boxes, and bulk stores to global memory.
// One thread issues each of these.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// How long L2 keeps what is copied, encoded as `createpolicy` encodes it for a whole access.
constexpr uint64_t EVICT_NORMAL = 0x1000000000000000;
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;

MLA_DEVICE void tma_prefetch_descriptor(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies a box of the tensor that `map` describes to shared memory. The coordinates are those of its first element,
// innermost first. The bytes count on the mbarrier.
MLA_DEVICE void tma_load(uint32_t to, const void* map, int x, int y, int z, int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}
MLA_DEVICE void tma_load(uint32_t to, const void* map, int x, int y, int z, int w, uint32_t barrier,
                         uint64_t cache_hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(cache_hint)
      : "memory");
}

// Copies a box to the same address of both CTAs of a cluster of two, and counts its bytes on the same mbarrier of each.
MLA_DEVICE void tma_load_multicast(uint32_t to, const void* map, int x, int y, int z, int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

MLA_DEVICE void tma_load_multicast(uint32_t to, const void* map, int x, int y, int z, int w, uint32_t barrier,
                                   uint64_t cache_hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(static_cast<uint16_t>(3)), "l"(cache_hint)
      : "memory");
}

// Copies contiguous bytes to shared memory, a multiple of 16 between addresses that are. They count on the mbarrier.
MLA_DEVICE void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t cache_hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(cache_hint)
      : "memory");
}

// Prefetches contiguous bytes into L2, a multiple of 16 from such an address on.
MLA_DEVICE void bulk_prefetch(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Prefetches a box into L2. Coordinates outside the tensor are ignored.
MLA_DEVICE void tma_prefetch(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

// Stores `bytes` of shared memory to global memory as one group, then waits until the reads of all but PENDING groups
// are done.
template <int PENDING>
MLA_DEVICE void bulk_store(void* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read %3;" ::"l"(to),
      "r"(from), "r"(bytes), "n"(PENDING)
      : "memory");
}

// Waits until all of this thread's bulk stores are in memory, and makes them visible to the generic proxy.
MLA_DEVICE void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
}

}  // namespace mla::sm_90
