// A block with keys as the first operand from beginning to end, of decode and of sparse decode: it initialises its
// mbarriers, then runs each warpgroup in its role.
#pragma once

#include "sm_90/decode/swap_ab/shared_storage.hpp"
#include "sm_90/ptx/griddep.hpp"
#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/setmaxnreg.hpp"
#include "sm_90/ptx/tma.hpp"

namespace mla::sm_90 {

// `Traits` joins a Problem and a Policy. The first PRODUCER_GROUPS are the producer, which walks the list of
// `TileScheduler`; the others multiply, and end each tile by `Epilogue`.
template <class Traits, class TileScheduler, template <class, class> class Producer,
          template <class, class> class Mainloop, template <class> class Epilogue>
struct SwapAbKernel {
  using Params = typename Traits::Params;

  // TMA reads the map of the queries where it lies, on a multiple of 64 bytes.
  struct alignas(64) Launch {
    Params params;
  };
  static_assert(sizeof(Launch) == sizeof(Params), "the driver copies as many bytes as the host packs");

  MLA_DEVICE static void run(const Params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = smem_address(memory);
    const int group = warp_uniform(thread_id() / 128);
    if (thread_id() == 0) init_mbarriers(shared);
    if constexpr (Traits::SELECTED) {
      if (thread_id() == 96) tma_prefetch_descriptor(params.q_map);
      // No other role touches global memory before the producer has given it something.
      griddep_wait();
      griddep_launch_dependents();
    }
    block_sync();
    if (group / Traits::PRODUCER_GROUPS == 0) {
      setmaxnreg_dec<Traits::PRODUCER_REGISTERS>();
      Producer<Traits, TileScheduler>(params, shared).run();
    } else {
      setmaxnreg_inc<Traits::CONSUMER_REGISTERS>();
      Mainloop<Traits, Epilogue<Traits>>(params, shared, group - Traits::PRODUCER_GROUPS).run();
    }
  }

 private:
  // Each mbarrier with the number of arrivals that completes a phase.
  MLA_DEVICE static void init_mbarriers(uint32_t shared) {
    const Mbarriers<Traits> barriers(shared);
    for (int stage = 0; stage < Traits::STAGES; ++stage) {
      mbarrier_init(barriers.kv_full(stage), Traits::FULL_ARRIVALS);  // the producer's warp that copies it
      mbarrier_init(barriers.kv_empty(stage), Traits::EMPTY_ARRIVALS);
    }
    for (int stage = 0; stage < Traits::TILE_STAGES; ++stage) {
      mbarrier_init(barriers.tile_full(stage), 1);  // the producer
      mbarrier_init(barriers.tile_empty(stage), Traits::CONSUMERS);
    }
    if constexpr (Traits::SELECTED) {
      mbarrier_init(barriers.q_full(), 1);  // the producer
      mbarrier_init(barriers.q_empty(), Traits::CONSUMERS);
      if constexpr (Traits::LEAVES_VALUES)
        for (int group = 0; group < Traits::GROUPS; ++group) mbarrier_init(barriers.vt_empty(group), 4);  // its warps
    }
    mbarrier_init_fence();
  }
};

}  // namespace mla::sm_90
