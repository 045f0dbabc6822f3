// Calls into the other CTA's shared memory of a cluster, declared only: no test on a CPU runs a cluster.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

inline uint32_t cluster_rank() { return 0; }
uint32_t map_to_peer(uint32_t address);
void peer_mbarrier_arrive(uint32_t barrier, bool active);
void peer_copy(uint32_t to, uint32_t from, int bytes, uint32_t barrier);
void peer_store_async(uint32_t to, uint32_t value, uint32_t barrier);
void cluster_sync();

}  // namespace mla::sm_90
