// What decode does so that combine can wait for the words of its partials (awaited.hpp): it makes all of them NOT_YET
// while its first keys are on their way, and then lets combine start.
//
// The copy engine stores them, from a pattern in shared memory: ordinary stores of 64 rows would keep the SM's loads,
// page numbers and queries, waiting for 2 us.
#pragma once

#include "sm_90/awaited.hpp"
#include "sm_90/cluster.hpp"
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
    asm volatile("bar.sync %0, 64;" ::"n"(FILL_BARRIER) : "memory");  // keys would wait behind it
    const int number = static_cast<int>(blockIdx.y) / (Policy::SIDES ? 2 : 1);
    const int64_t first = static_cast<int64_t>(number) * Policy::rows(params_) + first_row();
    const int rows = min(ROWS, Policy::rows(params_) - first_row());
    if (!Policy::SIDES || cluster_rank() == 0)
      for (int row = lane; row < rows; row += 32)
        store_arriving(params_.partial_lse + first + row, bit_cast<float>(NOT_YET));
    const int column = Policy::SIDES ? static_cast<int>(cluster_rank()) * VALUE_COLUMNS : 0;
    if (lane == 0) fill(reinterpret_cast<char*>(params_.partial_out + first * D_V + column), rows);
    __threadfence();
    barrier_arrive(filled_);
    __syncwarp();
    give_turn();
  }

 private:
  // Returns when this block's columns of so many rows are in memory. Few copies wait at a time, for keys wait behind
  // them.
  MLA_DEVICE void fill(char* to, int rows) const {
    constexpr int COLUMN_BYTES = Policy::BLOCK_COLUMNS * 4;
    const int bytes = rows * COLUMN_BYTES;
#pragma unroll 1
    for (int at = 0; at < bytes; at += Policy::PATTERN_BYTES, to += Policy::PATTERN_BYTES / COLUMN_BYTES * (D_V * 4))
      asm volatile(
          "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
          "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read %3;" ::"l"(to),
          "r"(pattern_), "r"(min(Policy::PATTERN_BYTES, bytes - at)), "n"(4096 / Policy::PATTERN_BYTES)
          : "memory");
    asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
  }

  const Params& params_;
  uint32_t filled_;
  uint32_t pattern_;
};

}  // namespace mla::sm90
