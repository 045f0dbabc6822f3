// The TMA producer of ClusterExchangeP: it also brings this CTA's half of the columns of the peer's keys, and sends
// every P to the peer.
#pragma once

#include "sm_90/decode/producer_tma_streaming.hpp"
#include "sm_90/ptx/dsmem.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerTmaExchange : ProducerTmaStreaming<Traits, Scheduler> {
  using Base = ProducerTmaStreaming<Traits, Scheduler>;
  using typename Base::Cluster, typename Base::KvState, typename Base::Params, typename Base::Stage,
      typename Base::Storage;
  using Base::params_, Base::barriers_, Base::shared_;

 public:
  MLA_DEVICE ProducerTmaExchange(const Params& params, uint32_t shared) : Base(params, shared) {}

  MLA_DEVICE void run() {
    const int warp = warp_uniform(warpgroup_thread() / 32);
    if (warp == Base::PREFETCH_WARP) return this->prefetch_and_fill();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    if (warp == Base::Q_WARP)
      load_queries_and_peer_keys(scheduler);
    else if (warp == Base::TILE_WARP)
      this->publish_tiles(scheduler, [](const WorkTile&, bool) {});
    else
      this->load_keys(scheduler);
    if (warp == Base::TILE_WARP) Cluster::template send_p<Traits>(shared_ - Storage::KV);
  }

 private:
  // The CTA has one tile, or none. Of the keys of the peer's split it needs its half of the columns.
  MLA_DEVICE void load_queries_and_peer_keys(Scheduler& scheduler) {
    if (!scheduler.more()) return;
    KvState kv;
    const int sequence = scheduler.tile().sequence;
    this->load_q(sequence, kv, Base::Q_WARP * 32);
    const int32_t* pages = this->pages_of(scheduler);
    scheduler.resolve_bounds();
    const EvenSplit<false> split = Cluster::peer_split(params_, sequence, scheduler.tile().length);
    PipelineState<Traits::PEER_STAGES> peer;
    if (split.first >= split.end) return;
    for (int first = split.first & -BLOCK_N; first < split.end; first += BLOCK_N) {
      const int block = static_cast<int>(cluster_rank()) * (Traits::WARPGROUP_COLUMNS / 64);
      const Stage to{shared_ + Storage::PEER_KV + peer.stage * Traits::PEER_STAGE_BYTES,
                     Cluster::peer_kv_full(barriers_, peer.stage), Cluster::peer_kv_empty(barriers_, peer.stage),
                     peer.parity};
      this->template load_boxes<Traits::PEER_STAGE_BYTES>(pages, first, block, to);
      peer.next();
    }
  }
};

}  // namespace mla::sm_90
