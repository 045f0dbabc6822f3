// Sparse decode for few heads: the entry. KV_FORMAT is a type of kv_format.hpp (arch.toml).
#include "sm_90/decode/swap_ab/kernel.hpp"
#include "sm_90/sparse_decode/few_heads/mainloop.hpp"
#include "sm_90/sparse_decode/few_heads/prologue.hpp"
#include "sm_90/sparse_decode/producer_dequant.hpp"

namespace mla::sm_90 {
using Traits = FewHeadsTraits<SparseDecodeProblem<KV_FORMAT>, FewHeadsPolicy<KV_FORMAT>>;
using Kernel = SwapAbKernel<Traits, SparseTileScheduler, ProducerDequant, FewHeadsMainloop, SwapAbEpilogue>;
}  // namespace mla::sm_90

extern "C" __global__ void __launch_bounds__(mla::sm_90::Traits::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::FewHeadsPrologue<mla::sm_90::Traits>::prefetch(launch.params);
  mla::sm_90::Kernel::run(launch.params);
}
