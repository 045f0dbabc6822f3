// TMA producers for a streaming combine: while the first keys are on their way, the prefetch warp fills the block's
// partial with the sentinel.
#pragma once

#include "sm_90/decode/producer_tma.hpp"
#include "sm_90/decode/sentinel_fill.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerTmaStreaming : protected ProducerTma<Traits, Scheduler> {
 protected:
  using Base = ProducerTma<Traits, Scheduler>;
  using typename Base::Params, typename Base::Storage;
  using Base::params_, Base::shared_;

 public:
  MLA_DEVICE ProducerTmaStreaming(const Params& params, uint32_t shared) : Base(params, shared) {}

  MLA_DEVICE void run() {
    const int warp = warp_uniform(warpgroup_thread() / 32);
    if (warp == Base::PREFETCH_WARP) return prefetch_and_fill();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    if (warp == Base::Q_WARP)
      this->load_queries(scheduler);
    else if (warp == Base::TILE_WARP)
      this->publish_tiles(scheduler, [](const WorkTile&, bool) {});
    else
      load_keys(scheduler);
  }

 protected:
  MLA_DEVICE void prefetch_and_fill() const {
    this->prefetch();
    if (Traits::combine_streams(params_)) SentinelFill<Traits>(params_, shared_ - Storage::KV).run();
  }

  // With a streaming combine a block has one tile; the fill may begin behind the tile's first keys.
  MLA_DEVICE void load_keys(Scheduler& scheduler) {
    Base::load_keys(scheduler, [&](auto... stage) { this->load_stage(stage...); },
                    [&] {
                      if (Traits::combine_streams(params_)) named_barrier_arrive<SENTINEL_FILL_BARRIER, 64>();
                    });
  }
};

}  // namespace mla::sm_90
