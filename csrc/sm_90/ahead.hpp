// Prefetches what a block reads first while the previous kernel still runs: the numbers that say where to read next,
// each of which depends on the one before, and the first keys.
//
// The previous kernel may still be writing these numbers. So they decide only what is prefetched into L2, they are read
// past L1, which would keep stale values, and whatever they are, no address outside the tensors follows from them.
#pragma once

#include "sm_90/policy.hpp"
#include "sm_90/work.hpp"

namespace mla::sm90 {

// The work of one warp, beside the warps that bring keys, queries and items.
template <class Policy>
class Ahead {
 public:
  MLA_DEVICE explicit Ahead(const Params& params) : params_(params), worker_(blockIdx.y), lane_(thread_id() % 32) {}

  // Before take_turn.
  MLA_DEVICE void ask() const {
    lines([](const int32_t* at) { prefetch_line(at); });
    if (Policy::SOURCE == Source::tma && params_.plan == nullptr && lane_ == 0) first_keys();
  }

  // With a plan, after take_turn: all its lines to L1 at once, so that each is there when it turns out to be needed.
  MLA_DEVICE void load() const {
    lines([](const int32_t* at) { load_line(at); });
  }

 private:
  // Calls `take` for the lines of the plan, of a length and of page numbers. With a plan, the first item and sequence
  // are guessed as if all workers had equally many.
  template <class Take>
  MLA_DEVICE void lines(const Take& take) const {
    if (params_.plan != nullptr) {
      const int item = PlanHeader::items_of(params_.batch, params_.workers) + PlanHeader::item_words * worker_;
      if (lane_ == 0) take(params_.plan);
      if (lane_ == 1) take(params_.plan + PlanHeader::work_of(params_.batch) + worker_);
      if (lane_ == 2 && item < params_.plan_words) take(params_.plan + item);
    }
    const int sequence = first_sequence();
    if (lane_ == 3) take(params_.seq_lens + sequence);
    if (lane_ == 4 && params_.kv_indptr != nullptr) take(params_.kv_indptr + sequence);
    if (lane_ * 32 < params_.page_ids_width) take(pages_of(sequence) + lane_ * 32);
  }

  // The first stage of an equal cut.
  MLA_DEVICE void first_keys() const {
    const int sequence = first_sequence();
    const int number = worker_ - sequence * params_.num_splits;
    const int first = EqualCut(params_, number, load_past_l1(params_.seq_lens + sequence), Policy::KEYS).first;
    const int in_table = divided(first, params_.page_magic, params_.page_shift);
    if (static_cast<uint32_t>(in_table) >= static_cast<uint32_t>(params_.page_ids_width)) return;
    const int page = load_past_l1(pages_of(sequence) + in_table);
#pragma unroll 1
    for (int block = 0; block < Policy::COLUMN_BLOCKS; block += Policy::BOX_BLOCKS)
      prefetch_box(&params_.kv_map_0, 0, first - in_table * params_.page, block, page);
  }

  MLA_DEVICE int first_sequence() const {
    if (params_.plan == nullptr) return divided(worker_, params_.splits_magic, params_.splits_shift);
    return static_cast<int>(static_cast<int64_t>(worker_) * params_.batch / params_.workers);
  }

  MLA_DEVICE const int32_t* pages_of(int sequence) const {
    return params_.page_ids + sequence * params_.page_ids_stride;
  }

  const Params& params_;
  int worker_;
  int lane_;
};

}  // namespace mla::sm90
