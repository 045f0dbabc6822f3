// Decode of e4m3 caches with keys as the first operand: the entry. DTYPE (of the queries) and Q_ROWS are the instance's
// constants (arch.toml).
#include "sm_90/decode/swap_ab/kernel.hpp"
#include "sm_90/decode/swap_ab/mainloop.hpp"
#include "sm_90/decode/swap_ab/producer.hpp"

namespace mla::sm_90 {
using Traits = SwapAbTraits<SwapAbProblem<DTYPE>, SwapAbPolicy<Q_ROWS>>;
using Kernel = SwapAbKernel<Traits, TileScheduler, SwapAbProducer, SwapAbMainloop, SwapAbEpilogue>;
}  // namespace mla::sm_90

extern "C" __global__ void __launch_bounds__(mla::sm_90::Traits::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::Kernel::run(launch.params);
}
