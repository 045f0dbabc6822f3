// Decode on sm_90: the entry. Roles and reasons are in README.md.
#include "sm_90/scores.hpp"
#include "sm_90/values.hpp"

namespace mla::sm90 {

using Policy = DecodePolicy<DTYPE, D_QK, Source::KV_SOURCE>;

struct alignas(64) Launch {
  Params params;
};
static_assert(sizeof(Launch) == sizeof(Params), "the driver copies as many bytes as the host packs");

MLA_DEVICE void decode(const Params& params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const Barriers<Policy> barriers(shared);
  // A warpgroup's number from one lane, so that the compiler knows the branch below is the same for a whole warp.
  const int group = __shfl_sync(~0u, thread_id() / 128, 0);
  if (thread_id() == 0) {
    for (int stage = 0; stage < Policy::STAGES; ++stage) {
      barrier_init(barriers.kv_full(stage), Policy::SOURCE == Source::tma ? 1 : 128);  // one asks TMA, or all copy
      barrier_init(barriers.kv_empty(stage), 8);  // the warps of the values
    }
    for (int slot = 0; slot < Policy::P_SLOTS; ++slot) {
      barrier_init(barriers.p_full(slot), 4);   // the warps of the scores
      barrier_init(barriers.p_empty(slot), 8);  // the warps of the values
    }
    for (int slot = 0; slot < Policy::ITEMS; ++slot) {
      barrier_init(barriers.item_full(slot), 1);   // the loader
      barrier_init(barriers.item_empty(slot), 4);  // the warps of the scores
    }
    barrier_init_done();
  }
  if (Policy::SOURCE == Source::tma && thread_id() == 32) prefetch_map(&params.kv_map_0);
  if (thread_id() == 64) prefetch_map(&params.q_map_0);
  wait_for_producer();
  release_consumer();
  block_sync();
  if (group == 0) {
    give_registers<LOADER_REGISTERS>();
    Loader<Policy>(params, shared).run();
  } else if (group == 1) {
    take_registers<SCORES_REGISTERS>();
    Scores<Policy>(params, shared).run();
  } else {
    take_registers<VALUES_REGISTERS>();
    Values<Policy>(params, shared, group - 2).run();
  }
}

}  // namespace mla::sm90

extern "C" __global__ void __launch_bounds__(mla::sm90::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm90::Launch launch) {
  mla::sm90::decode(launch.params);
}
