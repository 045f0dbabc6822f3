// The plan of equal numbers or sizes of splits: everything follows from a sequence's length and number.
#pragma once

#include "common/plan_prefix_sum.hpp"
#include "common/plan_words.hpp"
#include "common/split_keys.hpp"

namespace mla {

// With APART plans of num_splits and of split_size have code of their own, so that the first count by products.
template <class Wave, int waves, bool APART>
struct UniformPlan : PlanPrefixSum<Wave, waves>, PlanWords {
  using Base = PlanPrefixSum<Wave, waves>;
  using Base::divide, Base::split_alignment, Base::kv_len, Base::larger, Base::open, Base::round_up, Base::threads;
  using typename Base::Shared;

  // Code is compiled for plans of num_splits, of split_size, or for both, which it then distinguishes.
  enum class Given { num_splits, split_size, either };

  // The work tiles of a sequence: whole ones of `chunk` keys, one of the remaining keys, and, where every sequence has as
  // many, empty ones of cost 1.
  template <Given GIVEN>
  struct Equal {
    int64_t chunk, whole_cost, last_cost;
    int whole, splits;

    MLA_DEVICE Equal(const PlanParams& p, int64_t keys) : splits(p.splits) {
      chunk = split_keys(p.split_size, static_cast<int>(keys));
      if (GIVEN == Given::either ? p.num_splits == 0 : GIVEN == Given::split_size) {
        const int64_t needed = larger(divide(keys + chunk - 1, chunk), int64_t{1});
        if (needed < splits) splits = static_cast<int>(needed);
      } else {
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

  // Numbers of work tiles and of partial rows, which add up side by side.
  struct Counts {
    MLA_DEVICE static int64_t of(int splits) {
      return static_cast<int64_t>(splits) << 32 | (splits > 1 ? splits : 0);
    }
    MLA_DEVICE static int tiles(int64_t counts) { return static_cast<int>(counts >> 32); }
    MLA_DEVICE static int rows(int64_t counts) { return static_cast<int>(counts); }
    // The largest sum of which no more than `tiles` are work tiles.
    MLA_DEVICE static int64_t up_to(int64_t tiles) { return tiles << 32 | 0xffffffff; }
  };

  MLA_DEVICE static void write(const PlanParams& p) {
    MLA_SHARED Shared s;
    MLA_SHARED Shared counted;
    Wave::wait_for_producer();
    Wave::release_consumer();
    if constexpr (!APART)
      write<Given::either>(p, s, counted);
    else if (p.num_splits > 0)
      write<Given::num_splits>(p, s, counted);
    else
      write<Given::split_size>(p, s, counted);
  }

  template <Given GIVEN>
  MLA_DEVICE static void write(const PlanParams& p, Shared& s, Shared& counted) {
    using Equal = UniformPlan::Equal<GIVEN>;
    constexpr bool same = GIVEN == Given::num_splits;  // every sequence has as many splits
    Base::prefix_sum(p, s, false, [&](int64_t keys) {
      const Equal sequence(p, keys);
      return sequence.cost(sequence.splits);
    });
    if constexpr (!same)
      Base::prefix_sum(p, counted, false, [&](int64_t keys) { return Counts::of(Equal(p, keys).splits); });
    const auto before = [&](int b) { return same ? b * Counts::of(p.splits) : counted.costs.at[b]; };
    const int thread = block_id_x() * threads + thread_id();
    const int all = p.workgroups * threads;
    const int used = Counts::tiles(before(p.batch));
#pragma unroll 1
    for (int64_t i = thread; i < p.work_tile_capacity; i += all) {
      if (i >= used) {
        write_work_tile(p, i, -1, 0, 0, -1);
        continue;
      }
      const int b = same ? static_cast<int>(i) / p.splits : Base::sequence_at(p, counted.costs, Counts::up_to(i));
      const int split = static_cast<int>(i) - Counts::tiles(before(b));
      const Equal sequence(p, kv_len(p, b));
      const int64_t first = split * sequence.chunk, end = first + sequence.chunk;
      write_work_tile(p, i, b, first < open ? static_cast<int>(first) : open,
                      split + 1 == sequence.splits || end > open ? open : static_cast<int>(end),
                      sequence.splits > 1 ? Counts::rows(before(b)) + split : -1);
    }
    // The first parts take everything where there are more parts than tiles: a launch has no more blocks than tiles.
    const int parts = p.num_sm_parts < p.work_tile_capacity ? p.num_sm_parts : p.work_tile_capacity;
#pragma unroll 1
    for (int w = thread; w <= p.num_sm_parts; w += all) {
      const int64_t position = divide((w < parts ? w : parts) * s.costs.at[p.batch] + parts - 1, parts);
      const int b = Base::sequence_at(p, s.costs, position);
      int begun = Counts::tiles(before(b));
      if (b < p.batch) begun += Equal(p, kv_len(p, b)).begin_before(position - s.costs.at[b]);
      p.plan[p.work_indptr + w] = begun;
    }
#pragma unroll 1
    for (int b = thread; b <= p.batch; b += all) p.plan[p.split_indptr + b] = Counts::rows(before(b));
    write_frame(p, thread, all);
    if (thread == 0) write_counts(p, used, Counts::rows(before(p.batch)));
  }
};

}  // namespace mla
