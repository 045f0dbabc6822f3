// Decode of e4m3 caches with keys as the first operand: the entry. DTYPE (of the queries) and Q_ROWS are the instance's
// constants (arch.toml).
#include "sm_90/decode/swap_ab/kernel.hpp"

namespace mla::sm_90 {
using Kernel = SwapAbKernel<SwapAbTraits<DTYPE, Q_ROWS>>;
}

extern "C" __global__ void __launch_bounds__(mla::sm_90::SWAP_AB_THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::Kernel::run(launch.params);
}
