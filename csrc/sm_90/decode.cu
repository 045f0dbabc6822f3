// Decode on sm_90: the entry. Roles and reasons are in README.md.
#include "sm_90/scores.hpp"
#include "sm_90/values.hpp"

namespace mla::sm90 {

using Policy = DecodePolicy<DTYPE, D_QK, Source::KV_SOURCE, KEY_BLOCK, STAGE_COUNT, Q_REGS>;

// TMA reads its map in the launch parameters, where it must lie on 64 bytes. So the driver copies the parameters rounded
// up to 64 bytes: the host pads them.
struct alignas(64) Launch {
  DecodeParams params;
};

MLA_DEVICE void decode(const DecodeParams& params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const Barriers<Policy> barriers(shared);
  const int thread = thread_id() % 128;
  // A warpgroup's number from one lane, so that the compiler knows the branch below is the same for a whole warp.
  const int group = __shfl_sync(~0u, thread_id() / 128, 0);
  if (thread_id() == 0) {
    // The two values warpgroups bring a part of a stage each: every thread of theirs, or one that speaks to TMA.
    constexpr int BRINGERS = Policy::SOURCE == Source::tma ? 2 : 256;
    for (int stage = 0; stage < Policy::STAGES; ++stage) barrier_init(barriers.kv_full(stage), BRINGERS);
    for (int slot = 0; slot < Policy::P_SLOTS; ++slot) {
      barrier_init(barriers.p_full(slot), 4);  // the warps of the scores warpgroup
      for (int side = 0; side < 2; ++side) barrier_init(barriers.p_empty(slot, side), 4);  // of a values warpgroup
    }
    barrier_init_done();
  }
  if (Policy::SOURCE == Source::tma && thread_id() == 32) prefetch_map(&params.kv_map_0);
  block_sync();
  if (group == 2) {
    take_registers<SCORES_REGISTERS>();
    Scores<Policy>(params, shared, thread).run();
  } else {
    give_registers<VALUES_REGISTERS>();
    Values<Policy>(params, shared, group, thread).run();
  }
}

}  // namespace mla::sm90

extern "C" __global__ void __launch_bounds__(mla::sm90::THREADS, 1) MLA_SUITE_KERNEL(const __grid_constant__ mla::sm90::Launch launch) {
  mla::sm90::decode(launch.params);
}
