// The plan of equal numbers or sizes of splits: everything follows from a sequence's length and number.
#pragma once

#include "common/plan_prefix_sum.hpp"
#include "common/plan_words.hpp"

namespace mla {

template <class Wave, int waves>
struct UniformPlan : PlanPrefixSum<Wave, waves>, PlanWords {
  using Base = PlanPrefixSum<Wave, waves>;
  using Base::divide, Base::split_alignment, Base::kv_len, Base::larger, Base::open, Base::round_up, Base::threads;
  using typename Base::Shared;

  // The work tiles of a sequence when every sequence has `splits`: whole ones of `chunk` keys, one of the remaining
  // keys, and empty ones of cost 1.
  struct Equal {
    int64_t chunk, whole_cost, last_cost;
    int whole, splits;

    MLA_DEVICE Equal(const PlanParams& p, int64_t keys) : splits(p.splits) {
      chunk = p.split_size;
      if (p.num_splits > 0) {
        const int64_t aligned_blocks = (keys + split_alignment - 1) / split_alignment;
        chunk = larger(divide(aligned_blocks + splits - 1, splits), int64_t{1}) * split_alignment;
      }
      whole = static_cast<int>(divide(keys, chunk) < splits - 1 ? divide(keys, chunk) : splits - 1);
      const int64_t left = keys - whole * chunk;
      whole_cost = round_up(chunk) + p.work_tile_cost;
      last_cost = left > 0 ? round_up(left) + p.work_tile_cost : 1;
    }
    // Returns the cost of the first n work tiles.
    MLA_DEVICE int64_t cost(int n) const {
      return n <= whole ? n * whole_cost : whole * whole_cost + last_cost + (n - whole - 1);
    }
    // Returns how many work tiles begin before a cost, counted from the first work tile's beginning.
    MLA_DEVICE int begin_before(int64_t position) const {
      if (position <= 0) return 0;
      if (position <= whole * whole_cost) return static_cast<int>(divide(position + whole_cost - 1, whole_cost));
      const int64_t after = position - whole * whole_cost - last_cost;
      const int64_t n = whole + 1 + (after > 0 ? after : 0);
      return static_cast<int>(n < splits ? n : splits);
    }
  };

  MLA_DEVICE static void write(const PlanParams& p) {
    MLA_SHARED Shared s;
    Wave::wait_for_producer();
    Wave::release_consumer();
    Base::prefix_sum(p, s, false, [&](int64_t keys) { return Equal(p, keys).cost(p.splits); });
    const int thread = block_id_x() * threads + thread_id();
    const int all = p.workgroups * threads;
    const int64_t work_tiles = static_cast<int64_t>(p.batch) * p.splits;
#pragma unroll 1
    for (int64_t i = thread; i < work_tiles; i += all) {
      const int b = static_cast<int>(divide(i, p.splits));
      const int split = static_cast<int>(i - static_cast<int64_t>(b) * p.splits);
      const int64_t first = split * Equal(p, kv_len(p, b)).chunk;
      const int64_t end = first + Equal(p, kv_len(p, b)).chunk;
      write_work_tile(p, i, b, first < open ? static_cast<int>(first) : open,
                 split + 1 == p.splits || end > open ? open : static_cast<int>(end),
                 p.splits > 1 ? static_cast<int>(i) : -1);
    }
#pragma unroll 1
    for (int w = thread; w <= p.num_sm_parts; w += all) {
      const int64_t position = divide(w * s.costs.at[p.batch] + p.num_sm_parts - 1, p.num_sm_parts);
      const int b = Base::sequence_at(p, s.costs, position);
      int64_t begun = static_cast<int64_t>(b) * p.splits;
      if (b < p.batch) begun += Equal(p, kv_len(p, b)).begin_before(position - s.costs.at[b]);
      p.plan[p.work_indptr + w] = static_cast<int>(begun);
    }
#pragma unroll 1
    for (int b = thread; b <= p.batch; b += all) p.plan[p.split_indptr + b] = p.splits > 1 ? b * p.splits : 0;
    write_frame(p, thread, all);
    if (thread == 0) write_counts(p, static_cast<int>(work_tiles), p.splits > 1 ? static_cast<int>(work_tiles) : 0);
  }
};

}  // namespace mla
