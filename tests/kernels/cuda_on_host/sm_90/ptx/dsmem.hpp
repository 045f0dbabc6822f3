// A CPU runs no clusters.
#pragma once

#include "sm_90/ptx/tma.hpp"

namespace mla::sm_90 {

template <int APART = 1>
inline uint32_t map_to_peer(uint32_t) { fail("no cluster", 0); }
inline void peer_mbarrier_arrive(uint32_t, bool) { fail("no cluster", 0); }
inline void peer_store_async(uint32_t, uint32_t, uint32_t) { fail("no cluster", 0); }
inline void peer_copy(uint32_t, uint32_t, int, uint32_t) { fail("no cluster", 0); }
inline void cluster_sync() { fail("no cluster", 0); }

}  // namespace mla::sm_90
