// A block from beginning to end: its barriers, and which warpgroup is what.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/scores.hpp"
#include "sm_90/values.hpp"

namespace mla::sm90 {

// Makes the barriers, then runs each warpgroup in its role. The policy says what a role needs; `KeyLoader` brings keys.
template <class Policy, class KeyLoader>
MLA_DEVICE void run_block(const typename Policy::Params& params) {
  static_assert(Policy::LOADER_REGISTERS + Policy::SCORES_REGISTERS + 2 * Policy::VALUES_REGISTERS <= 512,
                "the registers of an SM");
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const Barriers<Policy> barriers(shared);
  // The warpgroup's number, taken from one lane so that the compiler knows the branch below is uniform within a warp.
  const int group = __shfl_sync(~0u, thread_id() / 128, 0);
  if (thread_id() == 96) {  // in a warp that does not ask for boxes
    for (int stage = 0; stage < Policy::STAGES; ++stage) {
      barrier_init(barriers.kv_full(stage), Policy::FULL_ARRIVALS);
      barrier_init(barriers.kv_empty(stage),  // the values, and the warps of the other block's
                   Policy::PAIRED  ? 256 + 8
                   : Policy::SIDES ? 128
                                   : 256);
    }
    for (int slot = 0; slot < Policy::P_SLOTS; ++slot) {
      barrier_init(barriers.p_full(slot), 128);  // the scores
      barrier_init(barriers.p_empty(slot),
                   Policy::SIDES ? 128 + 4 + 32 : 256);  // the values, warps of the other block's, and who sends
    }
    for (int slot = 0; slot < Policy::ITEMS; ++slot) {
      barrier_init(barriers.item_full(slot), 1);     // the loader
      barrier_init(barriers.item_empty(slot), 128);  // the scores
    }
    if constexpr (Policy::AWAITABLE) barrier_init(barriers.filled(), 32);  // a warp
    if constexpr (Policy::TWO_CUTS) {
      barrier_init(barriers.rows_sent(), 1);
      barrier_expect(barriers.rows_sent(), 2 * ROWS * 4);
      barrier_init(barriers.weighed(), 128);  // the scores
    }
    if constexpr (Policy::TOGETHER) {
      barrier_init(barriers.ring_left(), 8);  // the peer's values, by warp
      barrier_init(barriers.taken(), 4);      // of these, those that merge
      for (int warp = 0; warp < 4; ++warp)
        for (int chunk = 0; chunk < SENT_CHUNKS; ++chunk) {
          barrier_init(barriers.sent(warp, chunk), 1);
          barrier_expect(barriers.sent(warp, chunk), CHUNK_BYTES);
        }
    }
    if constexpr (Policy::SIDES) {
      for (int slot = 0; slot < Policy::P_SLOTS; ++slot) {
        barrier_init(barriers.p_written(slot), 128);               // the scores
        barrier_init(barriers.p_full(Policy::P_SLOTS + slot), 1);  // whoever waits for the other block's
      }
      for (int stage = 0; stage < Policy::PEER_STAGES; ++stage) {
        barrier_init(barriers.peer_full(stage), 1);     // the loader
        barrier_init(barriers.peer_empty(stage), 128);  // the values
      }
      for (int chunk = 0; chunk < 2 * GIVEN_CHUNKS; ++chunk)
        barrier_init(barriers.given(0, chunk), 128);  // a warpgroup of the values
    }
    barrier_init_done();
  }
  if constexpr (Policy::SOURCE == Source::tma)
    if (thread_id() == 32) prefetch_map(&params.kv_map_0);
  if (thread_id() == 64) prefetch_map(&params.q_map_0);
  // No other role touches global memory before the loader has given it something, so the loader waits for all of them.
  if constexpr (Policy::SOURCE == Source::selected) take_turn();
  blocks_meet<Policy>();  // the barriers are there
  if (group & 2) {
    take_registers<Policy::VALUES_REGISTERS>();
    Values<Policy>(params, shared, group - 2).run();
  } else if (group & 1) {
    take_registers<Policy::SCORES_REGISTERS>();
    Scores<Policy>(params, shared).run();
  } else {
    give_registers<Policy::LOADER_REGISTERS>();
    KeyLoader(params, shared).run();
  }
}

}  // namespace mla::sm90
