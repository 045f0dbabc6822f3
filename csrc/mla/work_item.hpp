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

// Word offsets in the header of a plan tensor (the layout that `plan` writes).
struct PlanHeader {
  static constexpr int work_indptr = 5;
  static constexpr int items = 7;
  static constexpr int item_words = 4;
};

// The items of one worker. With a plan: those between its two entries of work_indptr. Without: every workers-th cut
// of `num_splits` equal cuts per sequence (of split_size keys in the batch-invariant mode), in sequence order.
class WorkList {
 public:
  MLA_DEVICE WorkList(const DecodeParams& p, int worker) : p_(p) {
    if (p.plan) {
      const int32_t* bounds = p.plan + p.plan[PlanHeader::work_indptr] + worker;
      next_ = bounds[0];
      end_ = bounds[1];
      step_ = 1;
    } else {
      next_ = worker;
      end_ = p.batch * p.num_splits;
      step_ = p.workers;
    }
  }

  MLA_DEVICE bool more() const { return next_ < end_; }

  MLA_DEVICE WorkItem take() {
    const int n = next_;
    next_ += step_;
    WorkItem item;
    if (p_.plan) {
      const int32_t* words = p_.plan + p_.plan[PlanHeader::items] + static_cast<int64_t>(n) * PlanHeader::item_words;
      item = WorkItem{words[0], words[1], words[2], words[3]};
    } else {
      item.sequence = static_cast<int>(static_cast<uint32_t>(n) / static_cast<uint32_t>(p_.num_splits));
      const int split = n - item.sequence * p_.num_splits;
      const int cut = p_.split_size > 0 ? p_.split_size : equal_cut(p_.seq_lens[item.sequence]);
      item.first_key = split * cut;
      item.end_key = split + 1 == p_.num_splits ? OPEN : item.first_key + cut;
      item.partial_row = p_.num_splits > 1 ? n : -1;
    }
    const int kv_len = p_.seq_lens[item.sequence];
    item.end_key = item.end_key < kv_len ? item.end_key : kv_len;
    return item;
  }

 private:
  static constexpr int OPEN = 0x7fffffff;
  static constexpr uint32_t CUT_STEP = 16;   // a cut inside a matrix tile would be work done twice

  MLA_DEVICE int equal_cut(int kv_len) const {
    const uint32_t splits = static_cast<uint32_t>(p_.num_splits);
    const uint32_t even = (static_cast<uint32_t>(kv_len) + splits - 1) / splits;
    return static_cast<int>((even + CUT_STEP - 1) / CUT_STEP * CUT_STEP);
  }

  const DecodeParams& p_;
  int next_, end_, step_;
};

}  // namespace mla
