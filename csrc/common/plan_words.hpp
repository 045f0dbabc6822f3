// The words of a plan, as ops/plan/metadata.py reads them; four at a time wherever they lie together.
#pragma once

#include "common/device.hpp"
#include "common/params/plan.hpp"
#include "common/plan_header.hpp"

namespace mla {

struct PlanWords {
  // Writes work tile number `slot`: keys first..end - 1 of a sequence, whose result goes to partial row `row`, or -1.
  MLA_DEVICE static void write_work_tile(const PlanParams& p, int64_t slot, int sequence, int first, int end, int row) {
    write_words(p.plan + p.work_tiles + slot * PlanHeader::work_tile_words, sequence, first, end, row);
  }

  // Writes what follows from sizes alone: the header but for its last four words, and the zeros between the parts.
  // Shared among `threads_in_all` threads.
  MLA_DEVICE static void write_frame(const PlanParams& p, int thread, int threads_in_all) {
    if (thread == 0) {
      write_words(p.plan, p.magic, p.version, p.batch, p.num_sm_parts);
      write_words(p.plan + 4, p.work_tile_capacity, p.split_indptr, p.work_indptr, p.counters);
      write_words(p.plan + 8, p.work_tiles, p.work_tile_words, p.num_splits, p.split_size);
    }
#pragma unroll 1
    for (int i = p.counters + thread; i < p.work_tiles; i += threads_in_all) p.plan[i] = 0;
  }
  MLA_DEVICE static void write_counts(const PlanParams& p, int used, int partial_rows) {
    write_words(p.plan + 12, p.counters_per_sequence, used, partial_rows, p.max_seqlen_kv);
  }
  MLA_DEVICE static void write_words(int32_t* at, int a, int b, int c, int d) {
    Vec<int32_t, 4> words;
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
    *reinterpret_cast<Vec<int32_t, 4>*>(at) = words;
  }
};

}  // namespace mla
