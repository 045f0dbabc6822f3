// Which keys of which query token a workgroup attends to.
#pragma once

#include "cdna/cross_lane.hpp"
#include "mla/params/sparse_decode.hpp"
#include "mla/work_item.hpp"

namespace cdna {

// The items of one workgroup: those of every workers-th worker of the plan, or every workers-th of num_splits cuts per
// query token. An item's sequence is its query token. Everything is the same in all lanes, and kept in scalar registers.
class SelectionWork {
 public:
  MLA_DEVICE SelectionWork(const mla::SparseDecodeParams& p, int workgroup) : worker_(workgroup), next_(0), end_(0) {
    if (p.plan) {
      open_worker(p);
    } else {
      next_ = workgroup;
      end_ = p.tokens * p.num_splits;
    }
  }

  MLA_DEVICE bool more() const { return next_ < end_; }

  // The query token of the next item.
  MLA_DEVICE int token(const mla::SparseDecodeParams& p) const {
    return p.plan ? uniform(item_words(p)[0]) : static_cast<int>(static_cast<uint32_t>(next_) / static_cast<uint32_t>(p.num_splits));
  }

  // The next item, of a query token with `keys` keys.
  MLA_DEVICE mla::WorkItem take(const mla::SparseDecodeParams& p, int keys) {
    mla::WorkItem item;
    if (p.plan) {
      const int32_t* words = item_words(p);
      item = mla::WorkItem{uniform(words[0]), uniform(words[1]), uniform(words[2]), uniform(words[3])};
      if (++next_ == end_) {
        worker_ += p.workers;
        open_worker(p);
      }
    } else {
      item.sequence = token(p);
      const int split = next_ - item.sequence * p.num_splits;
      const int cut = p.split_size > 0 ? p.split_size : equal_cut(p, keys);
      item.first_key = split * cut;
      item.end_key = split + 1 == p.num_splits ? keys : item.first_key + cut;
      item.partial_row = p.num_splits > 1 ? next_ : -1;
      next_ += p.workers;
    }
    item.end_key = item.end_key < keys ? item.end_key : keys;
    return item;
  }

 private:
  static constexpr uint32_t CUT_STEP = 64;   // keys; the granule of equal cuts

  MLA_DEVICE static int equal_cut(const mla::SparseDecodeParams& p, int keys) {
    const uint32_t splits = static_cast<uint32_t>(p.num_splits);
    const uint32_t even = (static_cast<uint32_t>(keys) + splits - 1) / splits;
    return static_cast<int>(even < 1 ? CUT_STEP : (even + CUT_STEP - 1) / CUT_STEP * CUT_STEP);
  }

  MLA_DEVICE const int32_t* item_words(const mla::SparseDecodeParams& p) const {
    return p.plan + uniform(p.plan[mla::PlanHeader::items]) + static_cast<int64_t>(next_) * mla::PlanHeader::item_words;
  }

  // The first worker with items from worker_ on, in steps of the launch's workgroups.
  MLA_DEVICE void open_worker(const mla::SparseDecodeParams& p) {
    const int32_t* bounds = p.plan + uniform(p.plan[mla::PlanHeader::work_indptr]);
    for (const int workers = uniform(p.plan[mla::PlanHeader::workers]); worker_ < workers; worker_ += p.workers) {
      next_ = uniform(bounds[worker_]);
      end_ = uniform(bounds[worker_ + 1]);
      if (next_ < end_) return;
    }
    next_ = end_;
  }

  int worker_, next_, end_;
};

}  // namespace cdna
