// The TMA producer of un-rotated keys: the warps that publish and prefetch, which have little else to do, rotate them.
#pragma once

#include "sm_90/decode/producer_tma.hpp"
#include "sm_90/decode/rotate_rope.hpp"

namespace mla::sm_90 {

template <class Traits, class Scheduler>
class ProducerTmaRotated : ProducerTma<Traits, Scheduler> {
  using Base = ProducerTma<Traits, Scheduler>;
  using typename Base::KvState, typename Base::Params, typename Base::Stage, typename Base::Storage;
  using Base::shared_, Base::barriers_;
  using Rotator = RopeRotator<Traits>;

 public:
  MLA_DEVICE ProducerTmaRotated(const Params& params, uint32_t shared) : Base(params, shared) {}

  MLA_DEVICE void run() {
    const int warp = warp_uniform(warpgroup_thread() / 32);
    if (warp == Base::PREFETCH_WARP) this->prefetch();
    Scheduler scheduler = this->template start_scheduler<Scheduler>();
    if (warp == Base::Q_WARP) {
      this->load_queries(scheduler);
    } else if (warp == Base::TILE_WARP) {
      Rotator rotator(shared_ - Storage::KV);
      this->publish_tiles(scheduler, [&](const WorkTile& tile, bool queries) { rotator.tile(tile, queries); });
    } else if (warp == Base::PREFETCH_WARP) {
      Rotator(shared_ - Storage::KV).all_tiles(scheduler, true);
    } else {
      this->load_keys(scheduler, [&](auto... stage) { load_unrotated(stage...); }, [] {});
    }
  }

 private:
  // Loads a stage of un-rotated keys: first what is rotated while the rest is on its way.
  MLA_DEVICE void load_unrotated(const int32_t* pages, int first, int end, const KvState& kv) {
    constexpr int ROPE_BLOCK = Traits::COLUMN_BLOCKS - 1;
    const Stage stage = this->kv_stage(kv);
    this->wait_for_tma_stage(stage);
    if (warpgroup_thread() % 32 == 0) this->load_cos_sin(first, end, kv);
    const Stage rope{stage.at + Traits::ROPE_AT, barriers_.rope_full(kv.stage), stage.empty, stage.parity};
    this->template load_boxes<Traits::BLOCK_BYTES>(pages, first, ROPE_BLOCK, rope);
    this->template load_boxes<Traits::ROPE_AT>(pages, first, 0, stage);
  }
};

}  // namespace mla::sm_90
