// The work list: which keys of which sequence a block takes next. Every role of a block walks the same list.
#pragma once

#include "common/division.hpp"
#include "common/params/decode_tma.hpp"
#include "common/params/sparse_decode_tma.hpp"
#include "common/plan_header.hpp"
#include "sm_90/mbarrier.hpp"

namespace mla::sm90 {

using Params = DecodeTmaParams;

struct Item {
  int sequence;
  int length;       // keys of the sequence, as read now
  int first;        // first key of this item
  int end;          // one past its last key; not above first when the item is empty
  int partial_row;  // row of partial_out, or -1: the item is the whole sequence
  MLA_DEVICE int keys() const { return end > first ? end - first : 0; }
};

// Tells the compiler that a value is the same in every lane of a warp, so that it keeps it, and all that follows from
// it, in uniform registers. Without this every wgmma of the loop waits for two moves of its descriptor.
MLA_DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Four words of a plan. Its items begin at multiples of 16 bytes from its start, which a caller may have put anywhere.
MLA_DEVICE int4 four_words(const int32_t* words) {
  if (reinterpret_cast<uintptr_t>(words) % 16 == 0) return __ldg(reinterpret_cast<const int4*>(words));
  return make_int4(__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3));
}

// The query tokens of a sequence: where they begin among all tokens, and how many there are.
struct Queries {
  int64_t first_token;
  int count;
  MLA_DEVICE Queries(const Params& params, int sequence) {
    if (params.cu_seqlens_q != nullptr) {
      const int begin = uniform(load_word(params.cu_seqlens_q + sequence));
      first_token = begin;
      count = uniform(load_word(params.cu_seqlens_q + sequence + 1)) - begin;
    } else {
      first_token = static_cast<int64_t>(sequence) * params.q_len;
      count = params.q_len;
    }
  }
  // For sparse decode, where every query token is a sequence.
  MLA_DEVICE Queries(const SparseDecodeTmaParams&, int token) : first_token(token), count(1) {}
};

// The keys of cut `number` of a sequence, without a plan. Cuts are multiples of `block`, so that only the last one has
// unused keys.
struct EqualCut {
  int first;
  int end;
  MLA_DEVICE EqualCut(const Params& params, int number, int length, int block) {
    const int splits = params.num_splits;
    int size = params.split_size;
    if (size == 0) {
      const uint32_t blocks = (length + block - 1) / block;
      size = divided(blocks + splits - 1, params.splits_magic, params.splits_shift) * block;
    }
    const int64_t begin = static_cast<int64_t>(number) * size;
    first = begin < length ? static_cast<int>(begin) : length;
    // The last cut is open: with split_size a sequence longer than num_splits * split_size is still whole.
    const bool open = number + 1 == splits || first + static_cast<int64_t>(size) > length;
    end = open ? length : first + size;
  }
};

// A plan's items in order of worker, or equal cuts: sequence i / num_splits, cut i % num_splits. An item is looked up
// in two steps: `find` gives its sequence, which is all that its queries need; `measure` gives its keys, which takes
// the sequence's length from memory. Both are chains of dependent loads, so whoever walks the list looks up the next
// item where there is something to wait for anyway.
class WorkList {
 public:
  // `granule`: a plan's cuts are moved down to multiples of it, so that a copy never straddles a page.
  // `block`: equal cuts are multiples of it, so that only a sequence's last block has unused keys.
  MLA_DEVICE WorkList(const Params& params, int worker, int first_row, int granule, int block)
      : params_(params), first_row_(first_row), granule_(granule), block_(block), worker_(worker) {
    if (params.plan != nullptr) {
      // The header is loaded beside this worker's bounds: no address here depends on a loaded value. Past the plan's
      // workers a bound reads some other word of the plan, which has room for as many items as the launch has workers.
      const int workers = load_word(params.plan + PlanHeader::workers),
                items = load_word(params.plan + PlanHeader::items);
      load_worker();
      plan_workers_ = uniform(workers);
      items_ = uniform(items);
    } else {
      cursor_ = worker;
      limit_ = params.batch * params.num_splits;
    }
    find();
  }

  // Whether there is an item; false at the end of the list.
  MLA_DEVICE bool more() const { return more_; }

  // The item found last; until `measure`, only its sequence and partial row are valid.
  MLA_DEVICE const Item& item() const { return item_; }

  // Goes on to the next item that has rows for this block.
  MLA_DEVICE void find() {
    do more_ = advance();
    while (more_ && params_.cu_seqlens_q != nullptr &&
           first_row_ >= Queries(params_, item_.sequence).count * params_.heads);
  }

  MLA_DEVICE void measure() {
    if (!more_) return;
    item_.length = uniform(load_word(params_.seq_lens + item_.sequence));
    if (params_.plan != nullptr) {
      item_.first = item_.first / granule_ * granule_;
      const int cut = item_.end == 0x7FFFFFFF ? item_.end : item_.end / granule_ * granule_;
      item_.end = cut < item_.length ? cut : item_.length;
      return;
    }
    const EqualCut cut(params_, item_.first, item_.length, block_);
    item_.first = cut.first;
    item_.end = cut.end;
  }

  // Starts bringing the first page numbers of the item's sequence to L1, before `measure` tells which are wanted.
  MLA_DEVICE void load_pages() const {
    const int line = thread_id() % 32 * 32;
    if (more_ && line < params_.page_ids_width)
      load_line(params_.page_ids + item_.sequence * params_.page_ids_stride + line);
  }

 private:
  MLA_DEVICE bool advance() {
    if (params_.plan != nullptr) {
      while (cursor_ >= limit_ || worker_ >= plan_workers_) {
        worker_ += params_.workers;
        if (worker_ >= plan_workers_) return false;
        load_worker();
      }
      const int4 words = four_words(params_.plan + items_ + 4 * cursor_++);
      item_.sequence = uniform(words.x);
      item_.first = uniform(words.y);
      item_.end = uniform(words.z);
      item_.partial_row = uniform(words.w);
      return true;
    }
    if (cursor_ >= limit_) return false;
    item_.sequence = divided(cursor_, params_.splits_magic, params_.splits_shift);
    item_.first = cursor_ - item_.sequence * params_.num_splits;  // the cut's number
    item_.partial_row = params_.num_splits > 1 ? cursor_ : -1;
    cursor_ += params_.workers;
    return true;
  }

  MLA_DEVICE void load_worker() {
    const int32_t* bounds = params_.plan + PlanHeader::work_of(params_.batch) + worker_;
    const int begin = load_word(bounds), end = load_word(bounds + 1);
    cursor_ = uniform(begin);
    limit_ = uniform(end);
  }

  const Params& params_;
  int first_row_;
  int granule_;
  int block_;
  int worker_;
  int cursor_ = 0;
  int limit_ = 0;
  int plan_workers_ = 0;
  int items_ = 0;  // where a plan's items begin
  Item item_;
  bool more_;
};

// From rows to tokens and heads: row / heads by one multiplication, exact for rows below 2^32 / heads.
class Heads {
 public:
  MLA_DEVICE explicit Heads(const Params& params) : heads_(params.heads), magic_(params.heads_reciprocal) {}
  MLA_DEVICE explicit Heads(const SparseDecodeTmaParams& params)
      : heads_(params.heads), magic_(0xFFFFFFFFu / params.heads + 1) {}
  MLA_DEVICE int token(int row) const { return heads_ == 1 ? row : __umulhi(row, magic_); }
  MLA_DEVICE int head(int row, int token) const { return row - token * heads_; }

 private:
  int heads_;
  uint32_t magic_;
};

// One row of a block: its token and head, and how many keys it sees.
struct Row {
  int index;  // within the sequence
  int token;  // within the sequence
  int head;
  bool valid;
  MLA_DEVICE Row(const Heads& heads, const Queries& queries, int index_)
      : index(index_), token(heads.token(index_)), head(heads.head(index_, token)), valid(token < queries.count) {}
  MLA_DEVICE int limit(const Params& params, const Queries& queries, const Item& item) const {
    const int seen = params.causal ? item.length - queries.count + token + 1 : item.length;
    return seen < item.end ? seen : item.end;
  }
};

}  // namespace mla::sm90
