// plan: shares the keys of ragged sequences among workers. The same integer steps as ops/plan/cost.py and
// ops/plan/reference.py, so the same words. One source for every arch.
//
//   balanced  one workgroup: the cuts of the cheapest candidate, then the plan
//   uniform   the plan of equal numbers or sizes of splits; any number of workgroups
//
// A candidate is priced only if a bound from below on its cost leaves it a chance against the one that promises most,
// and few have one: 17 of 264 for one sequence of 8192 keys and 132 workers, one for 128 equal sequences.
// Loops stay rolled: a workgroup runs each a few times, and its time goes into fetching instructions.
#pragma once

#include "mla/block_scan.hpp"
#include "mla/params/plan.hpp"

namespace mla {

template <class Wave, int waves_>
struct Plan {
  static constexpr int waves = waves_;
  static constexpr int threads = waves_ * Wave::lanes;
  static constexpr int min_waves = 1;
  static constexpr int most_sequences = 2048;  // whose line fits in 48 KiB of shared memory beside the cuts
  static constexpr int most_workers = 1024;
  static constexpr int granule = 64;
  static constexpr int open = 0x7fffffff;
  static constexpr int64_t MOST = 0x7fffffffffffffff;

  struct Line {
    int64_t at[most_sequences + 1];  // where each sequence begins, and the end
    int64_t longest;                 // keys of the longest sequence, in whole granules
  };
  // Cut j lies before key `key` of a sequence.
  struct Cuts {
    int sequence[most_workers + 1];
    int key[most_workers + 1];
  };
  // Each new cut inside a sequence, in order: where an item begins other than at its sequence's start.
  struct Entries {
    int sequence[most_workers + 1];
    int key[most_workers + 1];
    int distinct[most_workers + 1];  // sequences among the entries up to each
  };
  struct Shared {
    Line line;
    BlockScan<Wave, waves_> scan;
    int64_t best_cost[waves_];
    int best_index[waves_];
    union {
      int64_t bounds[2 * most_workers];  // of each candidate's cost, while the cheapest is sought
      struct {
        Cuts cuts;
        Entries entries;
      };
    };
  };
  // A cut in each family: family 0 cuts at boundaries only, before sequence `whole`.
  struct Cut {
    int whole, sequence, key;
  };
  // Candidate index: family x workers + used - 1.
  struct Price {
    int64_t cost;
    int index;

    MLA_DEVICE bool beats(const Price& other) const {
      return cost < other.cost || (cost == other.cost && index < other.index);
    }
  };

  MLA_DEVICE static int64_t round_up(int64_t keys) { return (keys + granule - 1) / granule * granule; }
  MLA_DEVICE static int64_t divide(int64_t n, int64_t d) {  // neither is negative
    return static_cast<int64_t>(static_cast<uint64_t>(n) / static_cast<uint64_t>(d));
  }

  MLA_DEVICE static int64_t kv_len(const PlanParams& p, int b) {
    if (p.cu_seqlens_q != nullptr && p.cu_seqlens_q[b + 1] <= p.cu_seqlens_q[b]) return 0;
    return p.seq_lens[b];
  }

  // The line of sequences of which each costs what `cost` says.
  template <class Cost>
  MLA_DEVICE static void lay_line(const PlanParams& p, Shared& s, Cost cost) {
    const int thread = thread_id();
    int64_t begin = 0;
    int longest = 0;
#pragma unroll 1
    for (int base = 0; base < p.batch; base += threads) {
      const int b = base + thread;
      int64_t own = 0;
      if (b < p.batch) {
        const int64_t keys = kv_len(p, b);
        own = cost(keys);
        const int granules = static_cast<int>((keys + granule - 1) / granule);
        longest = granules > longest ? granules : longest;
      }
      int64_t all;
      const int64_t before = s.scan.exclusive(own, all);
      if (b < p.batch) s.line.at[b] = begin + before;
      begin += all;
    }
    longest = s.scan.largest(longest);
    if (thread == 0) {
      s.line.at[p.batch] = begin;
      s.line.longest = static_cast<int64_t>(longest) * granule;
    }
    block_sync();
  }

  // The number of sequences that end at `place` or before it.
  MLA_DEVICE static int sequence_at(const PlanParams& p, const Line& line, int64_t place) {
    int low = 0, high = p.batch;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (line.at[middle + 1] <= place) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Cut j of the candidates that use `used` workers.
  MLA_DEVICE static Cut cut_at(const PlanParams& p, const Line& line, int used, int j) {
    const int64_t fixed = p.item_cost;
    const int64_t crumb = round_up(fixed / 2);
    const int64_t place = divide(line.at[p.batch] * (j < used ? j : used), used);
    const int b = sequence_at(p, line, place);
    const int64_t offset = place - line.at[b];
    const int64_t length = b < p.batch ? line.at[b + 1] - line.at[b] - fixed : 0;
    const int64_t near = (divide(offset * length, length + fixed) + granule / 2) / granule * granule;
    const bool crumbs = near < crumb || length - near < crumb;
    return Cut{b + (2 * offset > length + fixed ? 1 : 0), b + (crumbs && 2 * near > length ? 1 : 0),
               crumbs ? 0 : static_cast<int>(near)};
  }

  // What the worker between cut j and the next costs.
  MLA_DEVICE static int64_t load(const PlanParams& p, const Line& line, int sequence, int key, int next, int next_key) {
    const bool first = key > 0, last = next_key > 0;
    const int64_t from = line.at[sequence] + (first ? p.item_cost + key : 0);
    const int64_t to = line.at[next] + (last ? p.item_cost + next_key : 0);
    if (to == from) return 0;
    const int rows = (first ? 1 : 0) + (last ? 1 : 0) - (first && last && sequence == next ? 1 : 0);
    return to - from + (first ? p.item_cost : 0) + 2 * p.tile_rows * rows;
  }

  MLA_DEVICE static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  MLA_DEVICE static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

  // How far apart a candidate's cuts are.
  MLA_DEVICE static int64_t spacing_of(const PlanParams& p, const Line& line, int index) {
    const int used = index % p.workers + 1;
    return larger(divide(line.at[p.batch] + used - 1, used), 1);
  }

  // What the last arriver of a split sequence adds.
  MLA_DEVICE static int64_t merge_cost(const PlanParams& p, const Line& line, int64_t spacing) {
    return p.tile_rows * (1 + divide(line.longest + spacing - 1, spacing));
  }

  // No candidate costs less: its dearest worker has at least an equal share of the line, and at least the longest
  // sequence unless one is split, which costs a merge.
  MLA_DEVICE static int64_t bound(const PlanParams& p, const Line& line, int index) {
    const int64_t spacing = spacing_of(p, line, index);
    const int64_t unsplit = larger(spacing, line.longest + p.item_cost);
    return index < p.workers ? unsplit : smaller(unsplit, spacing + merge_cost(p, line, spacing));
  }

  // The cost of a candidate, of which this wave looks at every `share`-th stretch of cuts from `first` on.
  struct Part {
    int64_t cost;
    int any;  // 1: something is split
  };
  MLA_DEVICE static Part price(const PlanParams& p, const Line& line, int index, int first, int share) {
    const int lane = thread_id() % Wave::lanes;
    const int used = index % p.workers + 1;
    const bool family = index >= p.workers;
    Part part{0, 0};
    // The last lane of a stretch only brings the cut at which the one before ends.
#pragma unroll 1
    for (int base = first * (Wave::lanes - 1); base < used; base += share * (Wave::lanes - 1)) {
      const Cut cut = cut_at(p, line, used, base + lane);
      const int sequence = family ? cut.sequence : cut.whole;
      const int key = family ? cut.key : 0;
      const int next = Wave::from_lane(sequence, lane + 1 < Wave::lanes ? lane + 1 : lane);
      const int next_key = Wave::from_lane(key, lane + 1 < Wave::lanes ? lane + 1 : lane);
      if (lane + 1 < Wave::lanes && base + lane < used)
        part.cost = larger(part.cost, load(p, line, sequence, key, next, next_key));
      part.any |= key > 0 ? 1 : 0;
    }
    for (int apart = 1; apart < Wave::lanes; apart *= 2)
      part.cost = larger(part.cost, from_lane<Wave>(part.cost, lane ^ apart));
    part.any = Wave::any(part.any != 0) ? 1 : 0;
    return part;
  }
  // The best of what the threads of the workgroup hold.
  MLA_DEVICE static Price best_of(Shared& s, Price mine) {
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    for (int apart = 1; apart < Wave::lanes; apart *= 2) {
      const Price other{from_lane<Wave>(mine.cost, lane ^ apart), Wave::from_lane(mine.index, lane ^ apart)};
      if (other.beats(mine)) mine = other;
    }
    if (lane == 0) {
      s.best_cost[wave] = mine.cost;
      s.best_index[wave] = mine.index;
    }
    block_sync();
    for (int w = 0; w < waves_; ++w) {
      const Price other{s.best_cost[w], s.best_index[w]};
      if (other.beats(mine)) mine = other;
    }
    block_sync();
    return mine;
  }

  // The cheapest candidate; of equals the first: one that splits nothing, then one with fewer workers.
  MLA_DEVICE static int cheapest(const PlanParams& p, Shared& s) {
    const int candidates = 2 * p.workers, wave = Wave::uniform(thread_id() / Wave::lanes);
    Price hopeful{MOST, candidates};
#pragma unroll 1
    for (int i = thread_id(); i < candidates; i += threads) {
      s.bounds[i] = bound(p, s.line, i);
      const Price other{s.bounds[i], i};
      if (other.beats(hopeful)) hopeful = other;
    }
    hopeful = best_of(s, hopeful);
    // All waves price the one that promises most together, then each those of its own that may beat the best it knows.
    Price best{MOST, candidates};
#pragma unroll 1
    for (int i = wave - waves_; i < candidates; i += waves_) {
      const bool together = i < 0;
      const int index = together ? hopeful.index : i;
      if (!together && (i == hopeful.index || !Price{s.bounds[i], i}.beats(best))) continue;
      Part part = price(p, s.line, index, together ? wave : 0, together ? waves_ : 1);
      if (together) {
        part.any = s.scan.largest(part.any);
        part.cost = -best_of(s, Price{-part.cost, 0}).cost;  // the largest of all waves
      }
      if (part.any != 0) part.cost += merge_cost(p, s.line, spacing_of(p, s.line, index));
      const Price other{part.cost, index};
      if (other.beats(best)) best = other;
    }
    return best_of(s, best).index;
  }

  MLA_DEVICE static void write_item(const PlanParams& p, int64_t slot, int sequence, int first, int end, int row) {
    Vec<int32_t, 4> item;
    item[0] = sequence;
    item[1] = first;
    item[2] = end;
    item[3] = row;
    *reinterpret_cast<Vec<int32_t, 4>*>(p.plan + p.items + slot * 4) = item;
  }

  // The header, and the zeros between the parts: shared among `threads_in_all` threads.
  MLA_DEVICE static void write_rest(const PlanParams& p, int thread, int threads_in_all, int used, int partial_rows) {
    if (thread == 0) {
      const int32_t header[16] = {p.magic, p.version, p.batch, p.workers, p.item_capacity, p.split_indptr,
                                  p.work_indptr, p.counters, p.items, p.item_words, p.num_splits, p.split_size,
                                  p.counters_per_sequence, used, partial_rows, p.max_kv_len};
      for (int i = 0; i < 16; ++i) p.plan[i] = header[i];
    }
#pragma unroll 1
    for (int i = p.counters + thread; i < p.items; i += threads_in_all) p.plan[i] = 0;
  }

  // Each new cut inside a sequence begins an item, and so does each sequence. Everything else follows from how many
  // entries belong to earlier sequences.
  MLA_DEVICE static void balanced(const PlanParams& p) {
    MLA_SHARED Shared s;
    Wave::wait_for_producer();
    Wave::release_consumer();
    lay_line(p, s, [&](int64_t keys) { return round_up(keys) + p.item_cost; });
    const int best = cheapest(p, s);
    const bool splits = best >= p.workers;
#pragma unroll 1
    for (int j = thread_id(); j <= p.workers; j += threads) {
      const Cut cut = cut_at(p, s.line, splits ? best - p.workers + 1 : best + 1, j);
      s.cuts.sequence[j] = splits ? cut.sequence : cut.whole;
      s.cuts.key[j] = splits ? cut.key : 0;
    }
    block_sync();

    Entries& list = s.entries;
    int count = 0, distinct = 0;
#pragma unroll 1
    for (int base = 0; base <= p.workers; base += threads) {
      const int j = base + thread_id();
      const bool exists = j <= p.workers;
      const int key = exists ? s.cuts.key[j] : 0;
      const int sequence = exists ? s.cuts.sequence[j] : 0;
      const bool same = j > 0 && exists && s.cuts.sequence[j - 1] == sequence && s.cuts.key[j - 1] > 0;
      const bool fresh = key > 0 && !(same && s.cuts.key[j - 1] == key);
      // Two counts in one sum: entries, and sequences that have one.
      int64_t all;
      const int64_t before = s.scan.exclusive(fresh ? (same ? 1 : (int64_t(1) << 32) + 1) : 0, all);
      const int at = count + static_cast<int>(before & 0xffffffff);
      if (fresh) {
        list.sequence[at] = sequence;
        list.key[at] = key;
        list.distinct[at] = distinct + static_cast<int>(before >> 32) + (same ? 0 : 1);
      }
      if (exists) p.plan[p.work_indptr + j] = sequence + at + (fresh ? 1 : 0);
      count += static_cast<int>(all & 0xffffffff);
      distinct += static_cast<int>(all >> 32);
    }
    block_sync();

    // Where the partial rows of a sequence begin, given the number of entries of earlier ones.
    const auto rows_before = [&](int entries) { return entries + (entries > 0 ? list.distinct[entries - 1] : 0); };
#pragma unroll 1
    for (int b = thread_id(); b <= p.batch; b += threads) {
      const int entries = entries_before(list.sequence, count, b);
      const int row = rows_before(entries);
      p.plan[p.split_indptr + b] = row;
      if (b == p.batch) break;
      const bool split = entries < count && list.sequence[entries] == b;
      write_item(p, b + entries, b, 0, split ? list.key[entries] : open, split ? row : -1);
    }
#pragma unroll 1
    for (int c = thread_id(); c < count; c += threads) {
      const int b = list.sequence[c];
      const int entries = entries_before(list.sequence, count, b);
      const bool more = c + 1 < count && list.sequence[c + 1] == b;
      write_item(p, b + c + 1, b, list.key[c], more ? list.key[c + 1] : open, rows_before(entries) + c + 1 - entries);
    }
    const int used = p.batch + count;
#pragma unroll 1
    for (int i = used + thread_id(); i < p.item_capacity; i += threads) write_item(p, i, -1, 0, 0, -1);
    write_rest(p, thread_id(), threads, used, rows_before(count));
  }

  // Entries of the sorted list that belong to sequences before b.
  MLA_DEVICE static int entries_before(const int* list, int count, int b) {
    int low = 0, high = count;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (list[middle] < b) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // A sequence's items when all have `splits`: whole ones of `chunk` keys, one with what is left, empty ones of cost 1.
  struct Equal {
    int64_t chunk, whole_cost, last_cost;
    int whole, splits;

    MLA_DEVICE Equal(const PlanParams& p, int64_t keys) : splits(p.splits) {
      chunk = p.split_size;
      if (p.num_splits > 0) {
        const int64_t granules = (keys + granule - 1) / granule;
        chunk = larger(divide(granules + splits - 1, splits), 1) * granule;
      }
      whole = static_cast<int>(divide(keys, chunk) < splits - 1 ? divide(keys, chunk) : splits - 1);
      const int64_t left = keys - whole * chunk;
      whole_cost = round_up(chunk) + p.item_cost;
      last_cost = left > 0 ? round_up(left) + p.item_cost : 1;
    }
    // What the first n items cost.
    MLA_DEVICE int64_t cost(int n) const {
      return n <= whole ? n * whole_cost : whole * whole_cost + last_cost + (n - whole - 1);
    }
    // How many items begin before `place`, counted from the first's beginning.
    MLA_DEVICE int begin_before(int64_t place) const {
      if (place <= 0) return 0;
      if (place <= whole * whole_cost) return static_cast<int>(divide(place + whole_cost - 1, whole_cost));
      const int64_t after = place - whole * whole_cost - last_cost;
      const int64_t n = whole + 1 + (after > 0 ? after : 0);
      return static_cast<int>(n < splits ? n : splits);
    }
  };

  MLA_DEVICE static void uniform(const PlanParams& p) {
    MLA_SHARED Shared s;
    Wave::wait_for_producer();
    Wave::release_consumer();
    lay_line(p, s, [&](int64_t keys) { return Equal(p, keys).cost(p.splits); });
    const int thread = block_id_x() * threads + thread_id();
    const int all = p.workgroups * threads;
    const int64_t items = static_cast<int64_t>(p.batch) * p.splits;
#pragma unroll 1
    for (int64_t i = thread; i < items; i += all) {
      const int b = static_cast<int>(divide(i, p.splits));
      const int split = static_cast<int>(i - static_cast<int64_t>(b) * p.splits);
      const int64_t first = split * Equal(p, kv_len(p, b)).chunk;
      const int64_t end = first + Equal(p, kv_len(p, b)).chunk;
      write_item(p, i, b, first < open ? static_cast<int>(first) : open,
                 split + 1 == p.splits || end > open ? open : static_cast<int>(end),
                 p.splits > 1 ? static_cast<int>(i) : -1);
    }
#pragma unroll 1
    for (int w = thread; w <= p.workers; w += all) {
      const int64_t place = divide(w * s.line.at[p.batch] + p.workers - 1, p.workers);
      const int b = sequence_at(p, s.line, place);
      int64_t begun = static_cast<int64_t>(b) * p.splits;
      if (b < p.batch) begun += Equal(p, kv_len(p, b)).begin_before(place - s.line.at[b]);
      p.plan[p.work_indptr + w] = static_cast<int>(begun);
    }
#pragma unroll 1
    for (int b = thread; b <= p.batch; b += all) p.plan[p.split_indptr + b] = p.splits > 1 ? b * p.splits : 0;
    write_rest(p, thread, all, static_cast<int>(items), p.splits > 1 ? static_cast<int>(items) : 0);
  }
};

}  // namespace mla
