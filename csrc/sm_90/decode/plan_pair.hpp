// How the two CTAs of a cluster share a plan (ClusterReduceLast): they walk SM parts 2k and 2k + 1, the odd one
// backwards. The work tiles where the two parts meet are often splits of one sequence; they are both CTAs' last, and
// the cluster merges them.
//
// Everything is read from the plan, so a captured launch follows whatever plan is there when it is replayed. Both CTAs
// read the same words, and so agree.
#pragma once

#include "sm_90/combine/sentinel.hpp"
#include "sm_90/decode/tile_scheduler.hpp"

namespace mla::sm_90 {

class PlanPair {
 public:
  // `part` is this CTA's; called after griddep_wait, by a whole warp.
  MLA_DEVICE PlanPair(const DecodeTmaParams& params, int part) {
    const int32_t* plan = params.plan;
    const int32_t* bounds = plan + PlanHeader::work_indptr_at(params.batch) + part / 2 * 2;
    const int parts = ld_global(plan + PlanHeader::num_sm_parts), work_tiles = ld_global(plan + PlanHeader::work_tiles),
              split_size = ld_global(plan + PlanHeader::split_size);
    const int begin = ld_global(bounds), middle = ld_global(bounds + 1), end = ld_global(bounds + 2);
    // Batch-invariant splits are merged in one order everywhere.
    if (!one_part_each(params, parts) || split_size != 0 || part / 2 * 2 + 1 >= parts) return;
    if (begin >= middle || middle >= end) return;
    const int4 first = load_plan_tile(plan + work_tiles + PlanHeader::work_tile_words * (middle - 1));
    const int4 second = load_plan_tile(plan + work_tiles + PlanHeader::work_tile_words * middle);
    if (first.x != second.x) return;
    merges_ = true;
    whole_ = first.y == 0 && second.z == PlanHeader::open_end;
    first_row_ = first.w;
    own_row_ = part % 2 == 0 ? first.w : second.w;
  }

  // Whether the last tiles of both parts are splits of one sequence.
  MLA_DEVICE bool merges() const { return merges_; }

  // Where what they are merged to goes: the partial row of the first, or -1 where they are the whole sequence.
  MLA_DEVICE int partial_row() const { return whole_ ? -1 : first_row_; }

  // Tells combine what it does not find in partials: a first split whose log-sum-exp is SENTINEL says that the results
  // are final; one of -inf that the split is part of another. Called by a whole warp for all rows of the block.
  MLA_DEVICE void tell_combine(const DecodeTmaParams& params, int part) const {
    if (!merges_ || (part % 2 == 0) != whole_) return;
    const float word = whole_ ? bit_cast<float>(SENTINEL) : -__builtin_huge_valf();
    for (int row = first_row() + thread_id() % 32; row < min(first_row() + BLOCK_M, params.rows); row += 32)
      params.partial_lse[static_cast<int64_t>(own_row_) * params.rows + row] = word;
  }

 private:
  bool merges_ = false;
  bool whole_ = false;
  int first_row_ = -1;
  int own_row_ = -1;
};

}  // namespace mla::sm_90
