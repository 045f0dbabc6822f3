// Prefetches what a block reads first while the previous kernel still runs: the numbers that say where to read next,
// each of which depends on the one before, and the first keys.
//
// The previous kernel may still be writing these numbers. So they decide only what is prefetched into L2; they are read
// past L1, which would keep stale values; and whatever they are, no address outside the tensors follows from them.
#pragma once

#include "common/division.hpp"
#include "sm_90/decode/tile_scheduler.hpp"
#include "sm_90/ptx/tma.hpp"

namespace mla::sm_90 {

// The coordinates of a column block in the TMA map of the cache: of rows of whole blocks, [pages][blocks][keys][64]; of
// others, [pages][1][keys][HEAD_DIM_QK], so that what a row lacks of its last block is outside of the map.
template <class Traits>
MLA_DEVICE constexpr int kv_map_column(int block) {
  return Traits::WHOLE_BLOCKS ? 0 : block * 64;
}
template <class Traits>
MLA_DEVICE constexpr int kv_map_block(int block) {
  return Traits::WHOLE_BLOCKS ? block : 0;
}

// The work of one warp, beside the warps that load keys, queries and work tiles.
template <class Traits>
class ProloguePrefetch {
  using Params = DecodeTmaParams;

 public:
  MLA_DEVICE explicit ProloguePrefetch(const Params& params)
      : params_(params), part_(blockIdx.y), lane_(thread_id() % 32) {}

  // Into L2, before griddep_wait.
  MLA_DEVICE void to_l2() const {
    for_each_line([](const int32_t* at) { prefetch_l2(at); });
    if (Traits::LOAD == KvLoad::tma && params_.plan == nullptr && lane_ == 0) first_keys();
    if constexpr (Traits::PREFETCHED_STAGES != 0)
      if (lane_ < Traits::PREFETCHED_STAGES) stage_of_first_tile(lane_);
  }

  // Into L1, after griddep_wait, with a plan: all lines at once, so that each is there when it turns out to be needed.
  MLA_DEVICE void to_l1() const {
    for_each_line([](const int32_t* at) { prefetch_l1(at); });
  }

 private:
  // Calls `prefetch` for the lines of the plan, of a length and of page numbers. With a plan, the first tile and its
  // sequence are guessed as if all SM parts had equally many.
  template <class Prefetch>
  MLA_DEVICE void for_each_line(const Prefetch& prefetch) const {
    if (params_.plan != nullptr) {
      const int tile =
          PlanHeader::work_tiles_at(params_.batch, params_.grid_stride) + PlanHeader::work_tile_words * part_;
      if (lane_ == 0) prefetch(params_.plan);
      if (lane_ == 1) prefetch(params_.plan + PlanHeader::work_indptr_at(params_.batch) + part_);
      if (lane_ == 2 && tile < params_.plan_words) prefetch(params_.plan + tile);
    }
    const int sequence = first_sequence();
    if (lane_ == 3) prefetch(params_.seq_lens + sequence);
    if (lane_ == 4 && params_.kv_indptr != nullptr) prefetch(params_.kv_indptr + sequence);
    if (lane_ * 32 < params_.page_ids_width) prefetch(pages_of(sequence) + lane_ * 32);
  }

  // The first stage of keys of an even split.
  MLA_DEVICE void first_keys() const {
    const int sequence = first_sequence();
    const int number = part_ - sequence * params_.num_splits;
    const int length = ld_relaxed_gpu(params_.seq_lens + sequence);
    const int begin = HAS_MASKS ? first_key(length, params_.q_len, params_.window_left) : 0;
    const int first = EvenSplit<Traits::FOLDS>(params_, number, length, begin, BLOCK_N).first & -BLOCK_N;
    const int in_table = divided(first, params_.page_reciprocal, params_.page_shift);
    if (static_cast<uint32_t>(in_table) >= static_cast<uint32_t>(params_.page_ids_width)) return;
    const int page = ld_relaxed_gpu(pages_of(sequence) + in_table);
#pragma unroll 1
    for (int block = 0; block < Traits::COLUMN_BLOCKS; block += Traits::BOX_BLOCKS)
      tma_prefetch(params_.kv_map, kv_map_column<Traits>(block), first - in_table * params_.page,
                   kv_map_block<Traits>(block), page);
  }

  // A stage of keys of an even split, or of the first tile of this SM part in a plan, where keys come by bulk copies. The
  // map's box is a stage, or what the page has of it.
  MLA_DEVICE void stage_of_first_tile(int stage) const {
    int sequence = first_sequence(), first = 0;
    if (params_.plan != nullptr) {
      const int tile = ld_relaxed_gpu(params_.plan + PlanHeader::work_indptr_at(params_.batch) + part_);
      const int64_t at = PlanHeader::work_tiles_at(params_.batch, params_.grid_stride) +
                         PlanHeader::work_tile_words * static_cast<int64_t>(tile);
      if (tile < 0 || at + PlanHeader::work_tile_words > params_.plan_words) return;
      sequence = ld_relaxed_gpu(params_.plan + at);
      first = ld_relaxed_gpu(params_.plan + at + 1);
      if (static_cast<uint32_t>(sequence) >= static_cast<uint32_t>(params_.batch)) return;
    }
    const int length = ld_relaxed_gpu(params_.seq_lens + sequence);
    if (params_.plan == nullptr) {
      const int begin = HAS_MASKS ? first_key(length, params_.q_len, params_.window_left) : 0;
      first = EvenSplit<Traits::FOLDS>(params_, part_ - sequence * params_.num_splits, length, begin, BLOCK_N).first;
    }
    const int64_t key = (first & -BLOCK_N) + static_cast<int64_t>(stage) * BLOCK_N;
    if (key < 0 || key >= length) return;
    const int in_table = divided(static_cast<uint32_t>(key), params_.page_reciprocal, params_.page_shift);
    if (static_cast<uint32_t>(in_table) >= static_cast<uint32_t>(params_.page_ids_width)) return;
    const int page = ld_relaxed_gpu(pages_of(sequence) + in_table);
    tma_prefetch(params_.kv_map, 0, static_cast<int>(key) - in_table * params_.page, 0, page);
  }

  MLA_DEVICE int first_sequence() const {
    if (params_.plan == nullptr) return divided(part_, params_.splits_reciprocal, params_.splits_shift);
    return static_cast<int>(static_cast<int64_t>(part_) * params_.batch / params_.grid_stride);
  }

  MLA_DEVICE const int32_t* pages_of(int sequence) const {
    return params_.page_ids + sequence * params_.page_ids_stride;
  }

  const Params& params_;
  int part_;
  int lane_;
};

}  // namespace mla::sm_90
