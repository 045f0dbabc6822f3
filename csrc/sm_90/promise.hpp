// What decode does so that combine can wait for the words of its partials (awaited.hpp): it makes all of them NOT_YET
// while its first keys are on their way, and then lets combine start.
//
// The copy engine stores them, from a pattern in shared memory: ordinary stores of 64 rows would keep the SM's loads,
// page numbers and queries, waiting for 2 us.
#pragma once

#include "sm_90/awaited.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/shared_copies.hpp"

namespace mla::sm90 {

// The work of one warp that has nothing else to do at first.
template <class Policy>
class Promise {
  using Params = typename Policy::Params;

 public:
  // `shared` is where the block's shared memory begins.
  MLA_DEVICE Promise(const Params& params, uint32_t shared)
      : params_(params), filled_(Barriers<Policy>(shared).filled()), pattern_(shared + Policy::PATTERN) {}

  MLA_DEVICE void make() const {
    const int lane = group_thread() % 32;
    for (int at = lane * 16; at < Policy::PATTERN_BYTES; at += 32 * 16)
      store16(pattern_ + at, NOT_YET, NOT_YET, NOT_YET, NOT_YET);
    fence_async();
    __syncwarp();
    wait_for_turn();
    const int64_t first = static_cast<int64_t>(blockIdx.y) * Policy::rows(params_) + first_row();
    const int rows = min(ROWS, Policy::rows(params_) - first_row());
    for (int row = lane; row < rows; row += 32)
      store_arriving(params_.partial_lse + first + row, bit_cast<float>(NOT_YET));
    if (lane == 0) fill(reinterpret_cast<char*>(params_.partial_out + first * D_V), rows * D_V * 4);
    __threadfence();
    barrier_arrive(filled_);
    __syncwarp();
    give_turn();
  }

 private:
  // Returns when all is in memory.
  MLA_DEVICE void fill(char* to, int bytes) const {
#pragma unroll 1
    for (int at = 0; at < bytes; at += Policy::PATTERN_BYTES)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + at), "r"(pattern_),
                   "r"(min(Policy::PATTERN_BYTES, bytes - at))
                   : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
  }

  const Params& params_;
  uint32_t filled_;
  uint32_t pattern_;
};

}  // namespace mla::sm90
