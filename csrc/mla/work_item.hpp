// Which keys of which sequence a workgroup attends to, and where its result goes.
#pragma once

#include "mla/device.hpp"
#include "mla/params/decode.hpp"

namespace mla {

struct WorkItem {
  int sequence;
  int first_key;
  int end_key;       // exclusive, already cut at the sequence's length; <= first_key when there is nothing to do
  int partial_row;   // row of partial_out, or -1: the result is final
};

// Words of a plan's header that a kernel reads (ops/plan/layout.py declares them all).
struct PlanHeader {
  static constexpr int workers = 3;
  static constexpr int work_indptr = 6;   // offset in words, as is the next
  static constexpr int items = 8;
  static constexpr int item_words = 4;
};

}  // namespace mla
