// For a streaming combine: fills this block's partial with the sentinel while its first keys are on their way, and then
// lets combine start.
//
// The copy engine stores it, from a pattern in shared memory. Ordinary stores of 64 rows would keep the SM's loads of
// page numbers and queries waiting for 2 us.
#pragma once

#include "sm_90/combine/sentinel.hpp"
#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/ptx/dsmem.hpp"
#include "sm_90/ptx/griddep.hpp"
#include "sm_90/ptx/tma.hpp"

namespace mla::sm_90 {

// An mbarrier that says that the partial has been filled, and what it is filled with.
template <int PATTERN_BYTES>
struct SentinelFillStorage {
  uint64_t filled;
  alignas(16) uint8_t pattern[PATTERN_BYTES];
};

// The work of one warp that has nothing else to do at first.
template <class Traits>
class SentinelFill {
  using Params = typename Traits::Params;
  using Cluster = typename Traits::Cluster;
  static constexpr int PATTERN_BYTES = Cluster::EXCHANGES_P ? Traits::BLOCK_COLUMNS * 4 : 4096;
  using Storage = SentinelFillStorage<PATTERN_BYTES>;

 public:
  // `shared` is where the block's shared memory begins.
  MLA_DEVICE SentinelFill(const Params& params, uint32_t shared)
      : params_(params),
        filled_(Cluster::sentinel_fill(Mbarriers<Traits>(shared)) + __builtin_offsetof(Storage, filled)),
        pattern_(Cluster::sentinel_fill(Mbarriers<Traits>(shared)) + __builtin_offsetof(Storage, pattern)) {}

  MLA_DEVICE void run() const {
    const int lane = warpgroup_thread() % 32;
    for (int at = lane * 16; at < PATTERN_BYTES; at += 32 * 16)
      st_shared_v4(pattern_ + at, SENTINEL, SENTINEL, SENTINEL, SENTINEL);
    fence_proxy_async();
    __syncwarp();
    griddep_wait();
    named_barrier_sync<SENTINEL_FILL_BARRIER, 64>();  // the loads of the first keys are issued first
    const int number = static_cast<int>(blockIdx.y) / (Cluster::EXCHANGES_P ? 2 : 1);
    const int64_t first = static_cast<int64_t>(number) * Traits::Problem::rows(params_) + first_row();
    const int rows = min(BLOCK_M, Traits::Problem::rows(params_) - first_row());
    if (!Cluster::EXCHANGES_P || cluster_rank() == 0)
      for (int row = lane; row < rows; row += 32)
        st_relaxed_gpu(params_.partial_lse + first + row, bit_cast<float>(SENTINEL));
    const int column = Cluster::EXCHANGES_P ? static_cast<int>(cluster_rank()) * Traits::WARPGROUP_COLUMNS : 0;
    if (lane == 0) fill(reinterpret_cast<char*>(params_.partial_out + first * Traits::HEAD_DIM_V + column), rows);
    __threadfence();
    mbarrier_arrive(filled_);
    __syncwarp();
    griddep_launch_dependents();
  }

 private:
  // Returns when this block's columns of `rows` rows are in memory. Few stores are outstanding at a time, because loads
  // of keys wait behind them.
  MLA_DEVICE void fill(char* to, int rows) const {
    constexpr int COLUMN_BYTES = Traits::BLOCK_COLUMNS * 4;
    const int bytes = rows * COLUMN_BYTES;
#pragma unroll 1
    for (int at = 0; at < bytes; at += PATTERN_BYTES, to += PATTERN_BYTES / COLUMN_BYTES * (Traits::HEAD_DIM_V * 4))
      bulk_store<4096 / PATTERN_BYTES>(to, pattern_, min(PATTERN_BYTES, bytes - at));
    bulk_store_wait();
  }

  const Params& params_;
  uint32_t filled_;
  uint32_t pattern_;
};

}  // namespace mla::sm_90
