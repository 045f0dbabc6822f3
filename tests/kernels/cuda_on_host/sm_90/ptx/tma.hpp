// Bulk copies on a CPU: they arrive when the block's scheduler lets them (block.hpp).
#pragma once

#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

constexpr uint64_t EVICT_NORMAL = 0, EVICT_FIRST = 1;

struct BulkCopy {
  uint32_t to;
  const void* from;
  int bytes;
  uint32_t barrier;

  void land() const {
    std::memcpy(memory + to, from, bytes);
    mbarrier_at(barrier).bytes -= bytes;
    mbarrier_at(barrier).settle();
  }
};
inline std::vector<BulkCopy> bulk_copies;

inline void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0 || to + bytes > SHARED_BYTES)
    fail("no such copy to", to);
  bulk_copies.push_back({to, from, bytes, barrier});
}

// Calls of producers with tensor maps, which no test runs.
inline uint32_t cluster_rank() { return 0; }
inline void tma_load(uint32_t, const void*, int, int, int, uint32_t) { fail("no tensor map", 0); }
inline void tma_load_multicast(uint32_t, const void*, int, int, int, uint32_t) { fail("no tensor map", 0); }
inline void tma_prefetch(const void*, int, int, int, int) { fail("no tensor map", 0); }

}  // namespace mla::sm_90
