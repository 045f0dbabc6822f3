// Words of a plan's header that kernels read; ops/plan/metadata.py declares them all.
#pragma once

#include "common/device.hpp"

namespace mla {

struct PlanHeader {
  static constexpr int num_sm_parts = 3;
  static constexpr int work_indptr = 6;  // offset in words, as is the next
  static constexpr int work_tiles = 8;
  static constexpr int work_tile_words = 4;
  static constexpr int split_size = 11;  // keys; 0 unless the plan is batch-invariant
  static constexpr int partial_rows = 14;
  static constexpr int words = 16;     // split_indptr [batch + 1] follows, then work_indptr [num_sm_parts + 1]
  static constexpr int counters = 16;  // of each sequence, then the work tiles, at a multiple of 4 words

  static constexpr int open_end = 0x7fffffff;  // end_key of a sequence's last work tile, which ends with the sequence

  // Where these lie, in words, in a plan for `batch` sequences and `num_sm_parts` SM parts.
  MLA_DEVICE static int work_indptr_at(int batch) { return words + batch + 1; }
  MLA_DEVICE static int work_tiles_at(int batch, int num_sm_parts) {
    return (work_indptr_at(batch) + num_sm_parts + 1 + counters * batch + 3) / 4 * 4;
  }
};

}  // namespace mla
