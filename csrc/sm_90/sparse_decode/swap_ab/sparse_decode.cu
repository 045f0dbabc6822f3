// Sparse decode with keys as the first operand: the entry. KV_FORMAT is a type of kv_format.hpp, Q_ROWS the most heads
// (arch.toml).
#include "sm_90/sparse_decode/swap_ab/kernel.hpp"

namespace mla::sm_90 {
using Traits = SparseSwapAbTraits<KV_FORMAT, Q_ROWS>;
using Kernel = SparseSwapAbKernel<Traits>;
}  // namespace mla::sm_90

extern "C" __global__ void __launch_bounds__(mla::sm_90::Traits::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::Kernel::run(launch.params);
}
