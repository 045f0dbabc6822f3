// A block of swap_ab from beginning to end: it initialises its mbarriers, then runs each warpgroup in its role.
#pragma once

#include "sm_90/decode/swap_ab/mainloop.hpp"
#include "sm_90/decode/swap_ab/producer.hpp"
#include "sm_90/ptx/griddep.hpp"
#include "sm_90/ptx/setmaxnreg.hpp"

namespace mla::sm_90 {

constexpr int SWAP_AB_THREADS = 384;

template <class Traits>
struct SwapAbKernel {
  using Params = typename Traits::Params;

  // The launch parameters are aligned as those of decode.
  struct alignas(64) Launch {
    Params params;
  };
  static_assert(sizeof(Launch) == sizeof(Params), "the driver copies as many bytes as the host packs");

  MLA_DEVICE static void run(const Params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = smem_address(memory);
    const int group = warp_uniform(thread_id() / 128);
    if (thread_id() == 0) init_mbarriers(shared);
    block_sync();
    if (group == 0) {
      setmaxnreg_dec<Traits::PRODUCER_REGISTERS>();
      SwapAbProducer<Traits, TileScheduler>(params, shared).run();
    } else {
      setmaxnreg_inc<Traits::CONSUMER_REGISTERS>();
      SwapAbMainloop<Traits>(params, shared, group - 1).run();
    }
  }

 private:
  // Each mbarrier with the number of arrivals that completes a phase.
  MLA_DEVICE static void init_mbarriers(uint32_t shared) {
    const Mbarriers<Traits> barriers(shared);
    for (int stage = 0; stage < Traits::STAGES; ++stage) {
      mbarrier_init(barriers.kv_full(stage), 1);  // the producer's warp whose turn it is
      mbarrier_init(barriers.kv_empty(stage), Traits::CONSUMERS);
    }
    for (int stage = 0; stage < Traits::TILE_STAGES; ++stage) {
      mbarrier_init(barriers.tile_full(stage), 1);  // the producer
      mbarrier_init(barriers.tile_empty(stage), Traits::CONSUMERS);
    }
    mbarrier_init_fence();
  }
};

}  // namespace mla::sm_90
