// A block from beginning to end: it initialises its mbarriers, then runs each warpgroup in its role.
#pragma once

#include "sm_90/decode/epilogue.hpp"
#include "sm_90/decode/mainloop_pv.hpp"
#include "sm_90/decode/mainloop_qk.hpp"
#include "sm_90/decode/tile_scheduler.hpp"
#include "sm_90/ptx/griddep.hpp"
#include "sm_90/ptx/setmaxnreg.hpp"
#include "sm_90/ptx/tma.hpp"

namespace mla::sm_90 {

// `Traits` joins a Problem and a Policy. The producer walks the list of `TileScheduler`; the mainloops are QkSoftmax (S
// and P) and PvMma (O), which ends each tile by `Epilogue_`.
template <class Traits, class TileScheduler, template <class, class> class Producer_,
          template <class> class MainloopQk_ = QkSoftmax, template <class, class> class MainloopPv_ = PvMma,
          template <class> class Epilogue_ = Epilogue>
struct DecodeKernel {
  using Params = typename Traits::Params;
  using Policy = typename Traits::Policy;
  using Cluster = typename Traits::Cluster;
  using Producer = Producer_<Traits, TileScheduler>;
  using MainloopQk = MainloopQk_<Traits>;
  using MainloopPv = MainloopPv_<Traits, Epilogue_<Traits>>;

  // The launch parameters as the kernel takes them: TMA reads its maps where they lie, on multiples of 64 bytes.
  struct alignas(64) Launch {
    Params params;
  };
  static_assert(sizeof(Launch) == sizeof(Params), "the driver copies as many bytes as the host packs");

  MLA_DEVICE static void run(const Params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = smem_address(memory);
    // The warpgroup's number, taken from one lane so that the compiler knows the branch below is uniform within a warp.
    const int group = __shfl_sync(~0u, thread_id() / 128, 0);
    if (thread_id() == 96) init_mbarriers(shared);  // in a warp that issues no TMA loads
    if constexpr (Traits::LOAD == KvLoad::tma || Traits::SCORES_AS_STORED)
      if (thread_id() == 32) tma_prefetch_descriptor(params.kv_map);
    if constexpr (!Traits::CONVERTS_Q)
      if (thread_id() == 64) tma_prefetch_descriptor(params.q_map);
    // No other role touches global memory before the producer has given it something, so the producer waits for all.
    if constexpr (Traits::SELECTED) {
      griddep_wait();
      griddep_launch_dependents();
    }
    Cluster::sync();  // the mbarriers are initialised
    if (group & 2) {
      setmaxnreg_inc<Policy::PV_REGISTERS>();
      MainloopPv(params, shared, group - 2).run();
    } else if (group & 1) {
      setmaxnreg_inc<Policy::QK_REGISTERS>();
      MainloopQk(params, shared).run();
    } else {
      setmaxnreg_dec<Policy::PRODUCER_REGISTERS>();
      Producer(params, shared).run();
    }
  }

 private:
  // Each mbarrier with the number of arrivals that completes a phase.
  MLA_DEVICE static void init_mbarriers(uint32_t shared) {
    const Mbarriers<Traits> barriers(shared);
    for (int stage = 0; stage < Traits::STAGES; ++stage) {
      mbarrier_init(barriers.kv_full(stage), Traits::FULL_ARRIVALS);  // the producer
      mbarrier_init(barriers.kv_empty(stage), Cluster::KV_EMPTY_ARRIVALS);
    }
    for (int stage = 0; stage < Traits::P_STAGES; ++stage) {
      mbarrier_init(barriers.p_full(stage), 128);  // the QK warpgroup
      mbarrier_init(barriers.p_empty(stage), Cluster::P_EMPTY_ARRIVALS);
    }
    for (int stage = 0; stage < Traits::TILE_STAGES; ++stage) {
      mbarrier_init(barriers.tile_full(stage), 1);     // the producer
      mbarrier_init(barriers.tile_empty(stage), 128);  // the QK warpgroup
    }
    if constexpr (Traits::CONVERTS_KEYS)
      for (int stage = 0; stage < Traits::RAW_STAGES; ++stage) {
        mbarrier_init(barriers.raw_full(stage), 1);     // the warp whose turn it is to copy
        // The producer, and the QK warpgroup if it multiplies what is stored.
        mbarrier_init(barriers.raw_empty(stage), Traits::SCORES_AS_STORED ? 256 : 128);
      }
    if constexpr (Traits::ROTATES)
      for (int stage = 0; stage < Traits::STAGES; ++stage)
        mbarrier_init(barriers.rope_full(stage), Traits::ROPE_FULL_ARRIVALS);  // the producer's threads that bring keys
    if constexpr (Traits::STREAMABLE) mbarrier_init(Cluster::sentinel_fill(barriers), 32);  // the warp of SentinelFill
    Cluster::init_mbarriers(barriers);
    mbarrier_init_fence();
  }
};

}  // namespace mla::sm_90
