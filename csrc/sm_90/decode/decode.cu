// Decode on sm_90: the entry. DTYPE (of the queries), D_QK, KV_SOURCE and CLUSTER_MODE are the instance's constants
// (arch.toml), ROTATE where rope parts are cached un-rotated, SCALE_Q where bf16 queries are multiplied as fp16, and D_V
// of latents that are not 512. sm_90/README.md describes the roles.
#include "sm_90/decode/cluster/modes.hpp"
#include "sm_90/decode/kernel.hpp"
#include "sm_90/decode/producer_cp_async.hpp"
#include "sm_90/decode/producer_fp8.hpp"
#include "sm_90/decode/producer_tma_exchange.hpp"
#include "sm_90/decode/producer_tma_rotated.hpp"

#ifndef ROTATE
#define ROTATE 0
#endif
#ifndef SCALE_Q
#define SCALE_Q 0
#endif
#ifndef FOLD
#define FOLD 0
#endif
#ifndef D_V
#define D_V 512
#endif

namespace mla::sm_90 {

template <KvLoad, class Cluster, bool ROTATES, class Traits, class Scheduler>
struct ProducerOf {  // the cluster modes that no combine streams beside
  using Type = ProducerTma<Traits, Scheduler>;
};
template <class Traits, class Scheduler>
struct ProducerOf<KvLoad::tma, ClusterNone, false, Traits, Scheduler> {
  using Type = typename SelectStorage<Traits::STREAMABLE, ProducerTmaStreaming<Traits, Scheduler>,
                                      ProducerTma<Traits, Scheduler>>::Type;
};
template <class Traits, class Scheduler>
struct ProducerOf<KvLoad::tma, ClusterExchangeP, false, Traits, Scheduler> {
  using Type = ProducerTmaExchange<Traits, Scheduler>;
};
template <class Cluster, class Traits, class Scheduler>
struct ProducerOf<KvLoad::tma, Cluster, true, Traits, Scheduler> {
  using Type = ProducerTmaRotated<Traits, Scheduler>;
};
template <class Cluster, bool ROTATES, class Traits, class Scheduler>
struct ProducerOf<KvLoad::cp_async, Cluster, ROTATES, Traits, Scheduler> {
  using Type = ProducerCpAsync<Traits, Scheduler>;
};
template <class Cluster, class Traits, class Scheduler>
struct ProducerOf<KvLoad::fp8, Cluster, false, Traits, Scheduler> {
  using Type = ProducerFp8<Traits, Scheduler>;
};
template <class Cluster, class Traits, class Scheduler>
struct ProducerOf<KvLoad::fp8_scores, Cluster, false, Traits, Scheduler> {
  using Type = ProducerFp8<Traits, Scheduler>;
};
template <class Traits, class Scheduler>
using Producer =
    typename ProducerOf<KvLoad::KV_SOURCE, cluster_mode::CLUSTER_MODE, ROTATE != 0, Traits, Scheduler>::Type;

using Policy = DecodePolicyOf<KvLoad::KV_SOURCE, cluster_mode::CLUSTER_MODE, D_QK, ROTATE, SCALE_Q, FOLD>;
using Traits = DecodeTraits<DecodeProblem<DTYPE, D_QK, ROTATE, D_V>, Policy>;
using Kernel = DecodeKernel<Traits, TileSchedulerFor<Traits>, Producer>;

}  // namespace mla::sm_90

extern "C" __global__ void MLA_CLUSTER_OF(CLUSTER_MODE) __launch_bounds__(mla::sm_90::THREADS, 1)
    MLA_SUITE_KERNEL(const __grid_constant__ mla::sm_90::Kernel::Launch launch) {
  mla::sm_90::Kernel::run(launch.params);
}
