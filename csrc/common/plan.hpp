// plan: divides the keys of ragged sequences among SM parts, with the same integer steps as ops/plan/scheduler.py,
// ops/plan/dealing.py and ops/plan/reference.py, so that both make the same words. One source for every arch.
//
//   search    one workgroup per candidate number of SM parts: the lower price of its two families -> two words of the
//             work tiles; and one per candidate that deals sequences out of order (plan_dealing.hpp)
//   balanced  one workgroup: the cheapest candidate's split points, then the plan
//   uniform   the plan of equal numbers or sizes of splits; any number of workgroups
//
// Every workgroup computes the prefix sum over the batch's costs for itself, which is cheaper than a launch. The two
// kernels are chains of dependent instructions, each of about 5 clocks on an H200. So whatever can be known before a
// wait is computed before it, and numbers have 32 bits where these suffice. Fewer launches were slower on an H200
// (csrc/sm_90/PERF.md).
#pragma once

#include "common/block_scan.hpp"
#include "common/params/plan.hpp"
#include "common/plan_dealing.hpp"
#include "common/plan_prefix_sum.hpp"
#include "common/plan_uniform.hpp"
#include "common/plan_words.hpp"

namespace mla {

// With DEALS plans may also deal sequences out of order; UNIFORM_APART is APART of UniformPlan.
template <class Wave, int waves, bool DEALS = false, bool UNIFORM_APART = false>
struct Plan : PlanPrefixSum<Wave, waves>, PlanWords {
  using Base = PlanPrefixSum<Wave, waves>;
  using Base::divide, Base::larger, Base::max_sm_parts, Base::open, Base::round_up, Base::threads;
  using typename Base::SplitPoint, typename Base::Divisor, typename Base::CostPrefixSum, typename Base::Shared;
  template <class Number>
  using SplitPoints = typename Base::template SplitPoints<Number>;
  static constexpr int min_waves = 1;
  static constexpr int64_t MOST = 0x7fffffffffffffff;
  static constexpr int INDEX_BITS = 11;  // of a candidate's number; a cost has at most 43
  static_assert(2 * max_sm_parts <= 1 << INDEX_BITS, "a candidate's number fits below its cost");
  static constexpr int read_together = 16;  // partials of a sequence, where the whole device reads them

  // The list of split points within a sequence.
  struct Entries {
    int sequence[max_sm_parts + 1];
    int key[max_sm_parts + 1];
    int row[max_sm_parts + 1];     // its partial row: one for each before it, one for each first split
    int before[max_sm_parts + 1];  // entries of the sequences before each, where these are not too many
  };
  using Dealing = PlanDealing<Wave, waves>;
  // Both kernels ask for the same shared memory. An SM does not change its split of shared memory and L1 while a block
  // is resident, so the second kernel could not begin beside the first otherwise.
  struct Memory : Shared {
    union alignas(DEALS ? Dealing::alignment : alignof(int64_t)) {
      Entries entries;  // of a plan in order
      typename Dealing::Dealt dealt;
    };
    uint32_t inverse[max_sm_parts];  // of each number of SM parts
  };
  // The price of some SM parts of a candidate: the cost of the slowest in each family, and the partials of family 1.
  template <class Number>
  struct Price {
    Number whole, split;
    int partials;
  };

  // Computes the price of both families with as many SM parts as this workgroup's number, and writes the lower one into
  // the words of the work tiles. The workgroups behind these have a candidate each that deals sequences out of order.
  MLA_DEVICE static void search(const PlanParams& p) {
    MLA_SHARED Memory s;
    materialize_params(p);
    Wave::wait_for_producer();
    Wave::release_consumer();
    if (thread_id() < p.batch) Wave::prefetch_line(p.seq_lens + thread_id());  // while the divisor is made
    const bool deals = DEALS && block_id_x() >= p.num_sm_parts;
    const Divisor used(deals ? Dealing::share_divisor(p) : block_id_x() + 1);
    Base::prefix_sum(p, s, p.partial_cost > 0, [&](int64_t keys) { return round_up(keys) + p.work_tile_cost; });
    if constexpr (DEALS)
      if (deals) return find_price_of_dealing(p, s, used, block_id_x() - p.num_sm_parts);
    if (Base::fits_32_bits(p, s.costs))
      find_price<int32_t>(p, s.costs, used);
    else
      find_price<int64_t>(p, s.costs, used);
  }

  template <class Number>
  MLA_DEVICE static void find_price(const PlanParams& p, const CostPrefixSum& costs, const Divisor& used) {
    MLA_SHARED Price<Number> prices[waves];
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    const Price<Number> own = price<Number>(p, costs, used);
    if (lane == 0) prices[wave] = own;
    block_sync();
    if (wave > 0) return;
    const bool exists = lane < waves;
    const int64_t whole = wave_largest<Wave>(exists ? prices[lane].whole : 0);
    int64_t split = wave_largest<Wave>(exists ? prices[lane].split : 0);
    int partials = 0;
    for (int w = 0; w < waves; ++w) partials += prices[w].partials;
    split += merge_cost(p, costs, used.number(), partials);
    const int number = used.number() - 1;
    if (lane == 0) found_prices(p)[number] = lower(ranked(whole, number), ranked(split, p.num_sm_parts + number));
  }

  MLA_DEVICE static void find_price_of_dealing(const PlanParams& p, Memory& s, const Divisor& shares, int number) {
    const int64_t cost = Dealing::price(p, s, s.dealt, Divisor(Dealing::chunk_of(p, s.costs, shares, number)));
    if (thread_id() == 0)
      found_prices(p)[p.num_sm_parts + number] = cost < 0 ? MOST : ranked(cost, 2 * p.num_sm_parts + number);
  }

  // Returns the price of this wave's SM parts. Each lane has a split point, the next lane the next one; the
  // last lane has no part.
  template <class Number>
  MLA_DEVICE static Price<Number> price(const PlanParams& p, const CostPrefixSum& costs, const Divisor& used) {
    constexpr int pairs = Wave::lanes - 1;
    const SplitPoints<Number> split_points(p, costs, used);
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    Number whole = 0, split = 0;
    int partials = 0;
#pragma unroll 1
    for (int base = wave * pairs; base < used.number(); base += waves * pairs) {
      const SplitPoint point = split_points.at(base + lane);
      const SplitPoint next = Base::from_lane_of(point, lane + 1);
      const bool exists = lane < pairs && base + lane < used.number();
      if (exists) {
        whole = larger(whole, load<Number>(p, costs, point.whole, 0, next.whole, 0));
        split = larger(split, load<Number>(p, costs, point.sequence, point.key, next.sequence, next.key));
      }
      // A sequence has one partial more than it has split points inside.
      const bool begins = exists && begins_work_tile(point.sequence, point.key, next.sequence, next.key);
      const bool leads = begins && splits_sequence(point.sequence, point.key, next.sequence);
      partials += Wave::count(begins) + Wave::count(leads);
    }
    return {wave_largest<Wave>(whole), wave_largest<Wave>(split), partials};
  }

  // Returns the cost of the SM part between two split points.
  template <class Number>
  MLA_DEVICE static Number load(const PlanParams& p, const CostPrefixSum& costs, int sequence, int key, int next,
                                int next_key) {
    const bool first = key > 0, last = next_key > 0;
    const Number from = static_cast<Number>(costs.at[sequence]) + (first ? p.work_tile_cost + key : 0);
    const Number to = static_cast<Number>(costs.at[next]) + (last ? p.work_tile_cost + next_key : 0);
    if (to == from) return 0;
    const int rows = (first ? 1 : 0) + (last ? 1 : 0) - (first && last && sequence == next ? 1 : 0);
    return to - from + (first ? p.work_tile_cost : 0) + 2 * p.partial_cost * rows;
  }

  // Returns the cost of these partials, which is added to that of the slowest SM part.
  MLA_DEVICE static int64_t merge_cost(const PlanParams& p, const CostPrefixSum& costs, int used, int partials) {
    int64_t cost = static_cast<int64_t>(p.shared_cost) * partials;
    if (p.partial_cost > 0 && partials > 0) {
      const int64_t spacing = larger(divide(costs.at[p.batch] + used - 1, used), int64_t{1});
      const int64_t reads = p.partial_cost * (1 + divide(costs.longest + spacing - 1, spacing));
      const bool by_all = !DEALS && p.shared_cost > 0;  // where sequences are dealt partial_cost is 0
      cost += by_all ? p.partial_cost + reads / read_together : reads;
    }
    return cost;
  }

  // Tells whether a work tile begins at a split point that differs from the one before it, and whether it is its
  // sequence's first.
  MLA_DEVICE static bool begins_work_tile(int last_sequence, int last_key, int sequence, int key) {
    return key > 0 && !(last_sequence == sequence && last_key == key);
  }
  MLA_DEVICE static bool splits_sequence(int last_sequence, int last_key, int sequence) {
    return !(last_sequence == sequence && last_key > 0);
  }

  // Packs a cost and its candidate's number into one word, so that of equal costs the first number is the lowest.
  MLA_DEVICE static int64_t ranked(int64_t cost, int number) { return cost << INDEX_BITS | number; }
  MLA_DEVICE static int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }

  // [num_sm_parts + dealt] of these lie where the work tiles will: 4 words each, and there are more work tiles than SM
  // parts, of which there are at least `dealt`.
  MLA_DEVICE static int64_t* found_prices(const PlanParams& p) {
    return reinterpret_cast<int64_t*>(p.plan + p.work_tiles);
  }

  // Reads the prices that one lane of each wave compares. Their addresses are computed before the prices are known.
  class PriceReader {
   public:
    static constexpr int each = 5, prices = each * Wave::lanes;

    MLA_DEVICE PriceReader(const PlanParams& p, int first) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int number = first + i * Wave::lanes + thread_id() % Wave::lanes;
        at_[i] = found_prices(p) + (number < prices_of(p) ? number : prices_of(p) - 1);
        Wave::materialize(at_[i]);  // here: the compiler would compute it behind the wait
      }
    }
    MLA_DEVICE int64_t lowest() const {
      int64_t all[each];
#pragma unroll
      for (int i = 0; i < each; ++i) all[i] = *at_[i];
      return best_among(all, [](int64_t a, int64_t b) { return a < b; });
    }

   private:
    const int64_t* at_[each];
  };

  MLA_DEVICE static int prices_of(const PlanParams& p) { return p.num_sm_parts + (DEALS ? p.dealt : 0); }

  // Returns the cheapest candidate; among equals one in order, then one that splits nothing, then the one with the
  // fewest SM parts.
  MLA_DEVICE static int cheapest(const PlanParams& p, const PriceReader& prices) {
    int64_t lowest = prices.lowest();
#pragma unroll 1
    for (int first = PriceReader::prices; first < prices_of(p); first += PriceReader::prices)
      lowest = lower(lowest, PriceReader(p, first).lowest());
    lowest = ~wave_largest<Wave>(~lowest);
    return static_cast<int>(lowest) & ((1 << INDEX_BITS) - 1);
  }

  // Writes the plan of the cheapest candidate. Each new split point inside a sequence is an entry of a list and begins
  // a work tile, and so does each sequence. The rest follows from the number of entries of earlier sequences.
  MLA_DEVICE static void balanced(const PlanParams& p) {
    MLA_SHARED Memory s;
    materialize_params(p);
#pragma unroll 1
    for (int i = thread_id(); i < p.num_sm_parts; i += threads) s.inverse[i] = Divisor::inverse(i + 1);
    // The kernel of the prices has waited for the producer of the lengths and for earlier readers of this plan.
    Base::prefix_sum(p, s, false, [&](int64_t keys) { return round_up(keys) + p.work_tile_cost; });
    write_frame(p, thread_id(), threads);
    const bool fits_32_bits = Base::fits_32_bits(p, s.costs);
    const PriceReader prices(p, 0);
    const typename Dealing::Chunks chunks(DEALS && p.dealt > 0, p, s.costs);
    Wave::wait_for_producer();
    Wave::release_consumer();
    const int best = cheapest(p, prices);
    if constexpr (DEALS)
      if (best >= 2 * p.num_sm_parts) return Dealing::write(p, s, s.dealt, chunks, best - 2 * p.num_sm_parts);
    const bool splits = best >= p.num_sm_parts;
    const int number = splits ? best - p.num_sm_parts : best;
    const Divisor used(number + 1, s.inverse[number]);
    const Counts counts =
        fits_32_bits ? list_entries<int32_t>(p, s, used, splits) : list_entries<int64_t>(p, s, used, splits);
    block_sync();
    write_work_tiles(p, s.entries, counts);
  }

  struct Counts {
    int entries, split;  // sequences that have entries
  };

  // With at most as many sequences as SM parts, the split point that reaches a sequence first counts the entries before
  // it. With more sequences, each sequence searches for its entries.
  MLA_DEVICE static bool few(const PlanParams& p) { return p.batch <= p.num_sm_parts; }

  // Fills the list, and finds the first work tile of each SM part. A lane has a split point and the lane before it the
  // one before; the first lane has that of the wave before, or none.
  template <class Number>
  MLA_DEVICE static Counts list_entries(const PlanParams& p, Memory& s, const Divisor& used, bool splits) {
    Entries& entries = s.entries;
    constexpr int new_points = Wave::lanes - 1;
    const SplitPoints<Number> split_points(p, s.costs, used);
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    Counts counts{};
#pragma unroll 1
    for (int turn = 0; turn * waves * new_points <= p.num_sm_parts; ++turn) {
      const int j = (turn * waves + wave) * new_points + lane - 1;
      const bool exists = lane > 0 && j <= p.num_sm_parts;
      SplitPoint point = split_points.at(j > 0 ? j : 0);
      if (!splits) {
        point.sequence = point.whole;
        point.key = 0;
      }
      SplitPoint last = Base::from_lane_of(point, lane - 1);
      if (j <= 0) last.sequence = -1;
      const bool begins = exists && begins_work_tile(last.sequence, last.key, point.sequence, point.key);
      const bool leads = begins && splits_sequence(last.sequence, last.key, point.sequence);
      uint32_t all;
      const uint32_t earlier = s.scan.count_before(begins, leads, turn, all);
      const int entry = counts.entries + static_cast<int>(earlier & 0xffff);
      if (begins) {
        entries.sequence[entry] = point.sequence;
        entries.key[entry] = point.key;
        entries.row[entry] = entry + counts.split + static_cast<int>(earlier >> 16) + (leads ? 1 : 0);
      }
      if (exists) p.plan[p.work_indptr + j] = point.sequence + entry + (begins ? 1 : 0);
      if (exists && few(p)) {
#pragma unroll 1
        for (int b = last.sequence + 1; b <= point.sequence; ++b) entries.before[b] = entry;
      }
      counts.entries += static_cast<int>(all & 0xffff);
      counts.split += static_cast<int>(all >> 16);
    }
    return counts;
  }

  MLA_DEVICE static void write_work_tiles(const PlanParams& p, const Entries& entries, const Counts& counts) {
#pragma unroll 1
    for (int b = thread_id(); b <= p.batch; b += threads) {
      const int before = few(p) ? entries.before[b] : entries_before(entries.sequence, counts.entries, b);
      const int row = before > 0 ? entries.row[before - 1] + 1 : 0;
      p.plan[p.split_indptr + b] = row;
      if (b == p.batch) break;
      const bool split = before < counts.entries && entries.sequence[before] == b;
      write_work_tile(p, b + before, b, 0, split ? entries.key[before] : open, split ? row : -1);
    }
    // The threads that had no sequence begin.
#pragma unroll 1
    for (int c = threads - 1 - thread_id(); c < counts.entries; c += threads) {
      const int b = entries.sequence[c];
      const bool more = c + 1 < counts.entries && entries.sequence[c + 1] == b;
      write_work_tile(p, b + c + 1, b, entries.key[c], more ? entries.key[c + 1] : open, entries.row[c]);
    }
    const int used = p.batch + counts.entries;
#pragma unroll 1
    for (int i = used + thread_id(); i < p.work_tile_capacity; i += threads) write_work_tile(p, i, -1, 0, 0, -1);
    if (thread_id() == threads - 1) write_counts(p, used, counts.entries + counts.split);
  }

  // Returns how many entries of the sorted list belong to sequences before b.
  MLA_DEVICE static int entries_before(const int* list, int count, int b) {
    int low = 0, high = count;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (list[middle] < b)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  // Loads the parameters here: the compiler would sink their loads behind the wait.
  MLA_DEVICE static void materialize_params(const PlanParams& p) {
    Wave::materialize(p.plan, static_cast<int64_t>(p.batch));
  }

  MLA_DEVICE static void uniform(const PlanParams& p) { UniformPlan<Wave, waves, UNIFORM_APART>::write(p); }
};

}  // namespace mla
