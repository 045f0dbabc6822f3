// Decode on sm_90: the entry. Roles and reasons are in README.md.
#include "sm_90/scores.hpp"
#include "sm_90/values.hpp"

namespace mla::sm90 {

using Policy = DecodePolicy<DTYPE, D_QK, KEY_BLOCK>;

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
    // Every thread of the two values warpgroups brings a part of a stage.
    for (int stage = 0; stage < Policy::STAGES; ++stage) barrier_init(barriers.kv_full(stage), 256);
    barrier_init(barriers.p_full(), 4);   // the warps of the scores warpgroup
    barrier_init(barriers.p_empty(), 8);  // the warps of the values warpgroups
    barrier_init_done();
  }
  block_sync();
  if (group == 2)
    Scores<Policy>(params, shared, thread).run();
  else
    Values<Policy>(params, shared, group, thread).run();
}

}  // namespace mla::sm90

extern "C" __global__ void __launch_bounds__(mla::sm90::THREADS, 1) MLA_SUITE_KERNEL(const __grid_constant__ mla::sm90::Launch launch) {
  mla::sm90::decode(launch.params);
}
