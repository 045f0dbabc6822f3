// plan: shares the keys of ragged sequences among workers. The same integer steps as ops/plan/cost.py and
// ops/plan/reference.py, so the same words. One source for every arch.
//
//   search    one workgroup per candidate number of workers: the cost of both its families -> two words of the items
//   balanced  one workgroup: the cheapest candidate's cuts, then the plan
//   uniform   the plan of equal numbers or sizes of splits; any number of workgroups
//
// Every workgroup lays the sequences on the line for itself: a prefix sum over the batch is cheaper than a launch.
// Loops stay rolled: a workgroup runs each a few times, and fetching instructions is what it waits for. One workgroup
// that prices only candidates with a chance needs no second launch, but took 11 to 72 us on an H200 where two launches
// took 5.4 to 8.7: its few waves divide 64-bit numbers one after the other.
#pragma once

#include "mla/block_scan.hpp"
#include "mla/params/plan.hpp"
#include "mla/plan_line.hpp"
#include "mla/plan_uniform.hpp"
#include "mla/plan_words.hpp"

namespace mla {

template <class Wave, int waves>
struct Plan : PlanLine<Wave, waves>, PlanWords {
  using Base = PlanLine<Wave, waves>;
  using Base::divide, Base::granule, Base::larger, Base::most_workers, Base::open, Base::round_up, Base::threads;
  using typename Base::Line, typename Base::Shared;
  static constexpr int min_waves = 1;
  static constexpr int64_t MOST = 0x7fffffffffffffff;
  static constexpr int INDEX_BITS = 11;  // of a candidate's number; a cost has at most 43
  static_assert(2 * most_workers <= 1 << INDEX_BITS, "a candidate's number fits below its cost");

  // What the worker between cut j and the next costs.
  MLA_DEVICE static int64_t load(const PlanParams& p, const Line& line, int sequence, int key, int next, int next_key) {
    const bool first = key > 0, last = next_key > 0;
    const int64_t from = line.at[sequence] + (first ? p.item_cost + key : 0);
    const int64_t to = line.at[next] + (last ? p.item_cost + next_key : 0);
    if (to == from) return 0;
    const int rows = (first ? 1 : 0) + (last ? 1 : 0) - (first && last && sequence == next ? 1 : 0);
    return to - from + (first ? p.item_cost : 0) + 2 * p.tile_rows * rows;
  }

  // The costs of both families with as many workers as this workgroup's number, among those of all: into the items.
  MLA_DEVICE static void search(const PlanParams& p) {
    MLA_SHARED Shared s;
    MLA_SHARED int64_t costs[2][waves];
    MLA_SHARED int partials_of[waves];
    Wave::wait_for_producer();
    Wave::release_consumer();
    Base::lay_line(p, s, p.tile_rows > 0, [&](int64_t keys) { return round_up(keys) + p.item_cost; });
    const int used = block_id_x() + 1;
    Base::place_cuts(p, s, used);
    int64_t whole = 0, split = 0;
    int partials = 0;  // of this wave: one for every cut within a sequence, one more for every such sequence
#pragma unroll 1
    for (int base = 0; base < p.workers; base += threads) {
      const int j = base + thread_id();
      bool begins = false, leads = false;
      if (j < p.workers) {
        whole = larger(whole, load(p, s.line, s.cuts.whole[j], 0, s.cuts.whole[j + 1], 0));
        const int sequence = s.cuts.sequence[j], next = s.cuts.sequence[j + 1];
        const int key = s.cuts.key[j], next_key = s.cuts.key[j + 1];
        split = larger(split, load(p, s.line, sequence, key, next, next_key));
        begins = begins_item(sequence, key, next, next_key);
        leads = begins && splits_sequence(sequence, key, next);
      }
      partials += Wave::count(begins) + Wave::count(leads);
    }
    whole = wave_largest(whole);
    split = wave_largest(split);
    const int wave = thread_id() / Wave::lanes;
    if (thread_id() % Wave::lanes == 0) {
      costs[0][wave] = whole;
      costs[1][wave] = split;
      partials_of[wave] = partials;
    }
    block_sync();
    const int family = thread_id();
    if (family >= 2) return;
    int64_t cost = best_among(costs[family], [](int64_t a, int64_t b) { return a > b; });
    partials = 0;
    for (int w = 0; w < waves; ++w) partials += partials_of[w];
    if (family == 1) {
      cost += static_cast<int64_t>(p.shared_cost) * partials;
      if (p.tile_rows > 0 && partials > 0) {
        const int64_t spacing = larger(divide(s.line.at[p.batch] + used - 1, used), 1);
        cost += p.tile_rows * (1 + divide(s.line.longest + spacing - 1, spacing));
      }
    }
    found_costs(p)[family * p.workers + used - 1] = cost;
  }

  // Whether an item begins at a cut that is not the one before it, and whether it is the first cut of its sequence.
  MLA_DEVICE static bool begins_item(int last_sequence, int last_key, int sequence, int key) {
    return key > 0 && !(last_sequence == sequence && last_key == key);
  }
  MLA_DEVICE static bool splits_sequence(int last_sequence, int last_key, int sequence) {
    return !(last_sequence == sequence && last_key > 0);
  }

  // [2][workers] costs lie where the items will: 4 words each, and there are at least as many items as workers.
  MLA_DEVICE static int64_t* found_costs(const PlanParams& p) { return reinterpret_cast<int64_t*>(p.plan + p.items); }

  // By halves: of those whose high half is the largest, the largest low half, as signed numbers in the same order.
  MLA_DEVICE static int64_t wave_largest(int64_t x) {
    const int lane = thread_id() % Wave::lanes;
    const int high = static_cast<int>(x >> 32);
    const int low = static_cast<int>(static_cast<uint32_t>(x) ^ 0x80000000u);
    const int highest = Wave::template max_over<Wave::lanes>(high, lane);
    const int lowest = static_cast<int>(0x80000000u);
    const uint32_t best = Wave::template max_over<Wave::lanes>(high == highest ? low : lowest, lane);
    return static_cast<int64_t>(static_cast<uint64_t>(highest) << 32 | (best ^ 0x80000000u));
  }

  // The cheapest candidate; of equals the first: one that splits nothing, then one with fewer workers.
  MLA_DEVICE static int cheapest(const PlanParams& p) {
    MLA_SHARED int64_t best_of[waves];
    const auto* costs = reinterpret_cast<const Vec<int64_t, 2>*>(found_costs(p));
    int64_t best = MOST;  // cost and number as one
#pragma unroll 1
    for (int pair = thread_id(); pair < p.workers; pair += threads) {
      const Vec<int64_t, 2> cost = costs[pair];
      for (int i = 0; i < 2; ++i) {
        const int64_t other = cost[i] << INDEX_BITS | (2 * pair + i);
        best = other < best ? other : best;
      }
    }
    best = ~wave_largest(~best);
    if (thread_id() % Wave::lanes == 0) best_of[thread_id() / Wave::lanes] = best;
    block_sync();
    best = best_among(best_of, [](int64_t a, int64_t b) { return a < b; });
    return static_cast<int>(best) & ((1 << INDEX_BITS) - 1);
  }

  // Cuts of the cheapest candidate. Each new cut inside a sequence is an entry of a list and begins an item; so does
  // each sequence. Everything else follows from how many entries belong to earlier sequences.
  MLA_DEVICE static void balanced(const PlanParams& p) {
    MLA_SHARED Shared s;
    MLA_SHARED int item_sequence[most_workers + 1];
    MLA_SHARED int item_key[most_workers + 1];
    MLA_SHARED int item_row[most_workers + 1];    // its partial row: one for each before it, one for each first piece
    MLA_SHARED int entries_of[most_workers + 1];  // entries of the sequences before each, where these are not too many
    // The lengths are as old as the costs' producer, which has waited for theirs; so is who read this memory before.
    Base::lay_line(p, s, false, [&](int64_t keys) { return round_up(keys) + p.item_cost; });
    write_frame(p, thread_id(), threads);
    Wave::wait_for_producer();
    Wave::release_consumer();
    const int best = cheapest(p);
    const bool splits = best >= p.workers;
    Base::place_cuts(p, s, splits ? best - p.workers + 1 : best + 1);
    const int* sequences = splits ? s.cuts.sequence : s.cuts.whole;

    // As many sequences as workers at most: the cut that reaches a sequence first counts the entries before it. Of more
    // sequences each looks for them.
    const bool few = p.batch <= p.workers;
    int count = 0, split_count = 0;  // entries, and sequences among them
#pragma unroll 1
    for (int base = 0; base <= p.workers; base += threads) {
      const int j = base + thread_id();
      const bool exists = j <= p.workers;
      const int key = exists && splits ? s.cuts.key[j] : 0;
      const int sequence = exists ? sequences[j] : 0;
      const int last = exists && j > 0 ? sequences[j - 1] : -1;
      const int last_key = exists && splits && j > 0 ? s.cuts.key[j - 1] : 0;
      const bool begins = begins_item(last, last_key, sequence, key);
      const bool leads = begins && splits_sequence(last, last_key, sequence);
      uint32_t all;
      const uint32_t earlier = s.scan.count_before(begins, leads, base / threads, all);
      const int entry = count + static_cast<int>(earlier & 0xffff);
      if (begins) {
        item_sequence[entry] = sequence;
        item_key[entry] = key;
        item_row[entry] = entry + split_count + static_cast<int>(earlier >> 16) + (leads ? 1 : 0);
      }
      if (exists) p.plan[p.work_indptr + j] = sequence + entry + (begins ? 1 : 0);
      if (exists && few) {
#pragma unroll 1
        for (int b = last + 1; b <= sequence; ++b) entries_of[b] = entry;
      }
      count += static_cast<int>(all & 0xffff);
      split_count += static_cast<int>(all >> 16);
    }
    block_sync();

#pragma unroll 1
    for (int b = thread_id(); b <= p.batch; b += threads) {
      const int entries = few ? entries_of[b] : entries_before(item_sequence, count, b);
      const int row = entries > 0 ? item_row[entries - 1] + 1 : 0;
      p.plan[p.split_indptr + b] = row;
      if (b == p.batch) break;
      const bool split = entries < count && item_sequence[entries] == b;
      write_item(p, b + entries, b, 0, split ? item_key[entries] : open, split ? row : -1);
    }
    // Beginning with the threads that had no sequence.
#pragma unroll 1
    for (int c = threads - 1 - thread_id(); c < count; c += threads) {
      const int b = item_sequence[c];
      const bool more = c + 1 < count && item_sequence[c + 1] == b;
      write_item(p, b + c + 1, b, item_key[c], more ? item_key[c + 1] : open, item_row[c]);
    }
    const int used = p.batch + count;
#pragma unroll 1
    for (int i = used + thread_id(); i < p.item_capacity; i += threads) write_item(p, i, -1, 0, 0, -1);
    if (thread_id() == threads - 1) write_counts(p, used, count + split_count);
  }

  // Entries of the sorted list that belong to sequences before b.
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

  MLA_DEVICE static void uniform(const PlanParams& p) { UniformPlan<Wave, waves>::write(p); }
};

}  // namespace mla
