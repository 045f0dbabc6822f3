// Words of a plan's header that kernels read; ops/plan/layout.py declares them all.
#pragma once

namespace mla {

struct PlanHeader {
  static constexpr int workers = 3;
  static constexpr int work_indptr = 6;  // offset in words, as is the next
  static constexpr int items = 8;
  static constexpr int item_words = 4;
  static constexpr int partial_rows = 14;
  static constexpr int words = 16;  // split_indptr [batch + 1] follows, then work_indptr
};

}  // namespace mla
