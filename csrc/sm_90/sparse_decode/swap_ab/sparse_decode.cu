// Sparse decode with keys as the first operand: the entry. KV_FORMAT is a type of kv_format.hpp, Q_ROWS the most heads
// (arch.toml).
#include "sm_90/decode/swap_ab/kernel.hpp"
#include "sm_90/sparse_decode/swap_ab/mainloop.hpp"
#include "sm_90/sparse_decode/swap_ab/producer.hpp"

namespace mla::sm_90 {
using Traits = SparseSwapAbTraits<SparseDecodeProblem<KV_FORMAT>, SparseSwapAbPolicy<Q_ROWS>>;
using Kernel =
    SwapAbKernel<Traits, SparseTileScheduler, SparseSwapAbProducer, SparseSwapAbMainloop, SwapAbEpilogue>;
}  // namespace mla::sm_90

extern "C" __global__ void __launch_bounds__(mla::sm_90::Traits::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::Kernel::run(launch.params);
}
