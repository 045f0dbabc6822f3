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

// The items of one workgroup. With a plan: those of every workers-th worker of the plan, so any number of workgroups
// does all of it. Without: every workers-th of `num_splits` cuts per sequence, equal ones or of split_size keys.
class WorkList {
 public:
  MLA_DEVICE WorkList(const DecodeParams& p, int workgroup) : worker_(workgroup), next_(0), end_(0) {
    if (p.plan) {
      open_worker(p);
    } else {
      next_ = workgroup;
      end_ = p.batch * p.num_splits;
    }
  }

  MLA_DEVICE bool more() const { return next_ < end_; }

  MLA_DEVICE WorkItem take(const DecodeParams& p) {
    const int n = next_;
    WorkItem item;
    if (p.plan) {
      const int32_t* words = p.plan + p.plan[PlanHeader::items] + static_cast<int64_t>(n) * PlanHeader::item_words;
      item = WorkItem{words[0], words[1], words[2], words[3]};
      if (++next_ == end_) {
        worker_ += p.workers;
        open_worker(p);
      }
    } else {
      next_ += p.workers;
      item.sequence = static_cast<int>(static_cast<uint32_t>(n) / static_cast<uint32_t>(p.num_splits));
      const int split = n - item.sequence * p.num_splits;
      const int cut = p.split_size > 0 ? p.split_size : equal_cut(p, p.seq_lens[item.sequence]);
      item.first_key = split * cut;
      item.end_key = split + 1 == p.num_splits ? OPEN : item.first_key + cut;
      item.partial_row = p.num_splits > 1 ? n : -1;
    }
    const int kv_len = p.seq_lens[item.sequence];
    item.end_key = item.end_key < kv_len ? item.end_key : kv_len;
    return item;
  }

 private:
  static constexpr int OPEN = 0x7fffffff;
  static constexpr uint32_t CUT_STEP = 64;   // the granule of plan's equal cuts

  MLA_DEVICE static int equal_cut(const DecodeParams& p, int kv_len) {
    const uint32_t splits = static_cast<uint32_t>(p.num_splits);
    const uint32_t even = (static_cast<uint32_t>(kv_len) + splits - 1) / splits;
    return static_cast<int>(even < 1 ? CUT_STEP : (even + CUT_STEP - 1) / CUT_STEP * CUT_STEP);
  }

  // The first worker with items from worker_ on, in steps of the launch's workgroups.
  MLA_DEVICE void open_worker(const DecodeParams& p) {
    const int32_t* bounds = p.plan + p.plan[PlanHeader::work_indptr];
    for (const int workers = p.plan[PlanHeader::workers]; worker_ < workers; worker_ += p.workers) {
      next_ = bounds[worker_];
      end_ = bounds[worker_ + 1];
      if (next_ < end_) return;
    }
    next_ = end_;
  }

  int worker_, next_, end_;
};

}  // namespace mla
