// The plan that deals sequences to SM parts out of order (ops/plan/dealing.py): whole chunks of long sequences are SM
// parts of their own, and what is left of every sequence is dealt to the others, the longest first, in turns.
#pragma once

#include "common/plan_prefix_sum.hpp"
#include "common/plan_words.hpp"

namespace mla {

template <class Wave, int waves>
struct PlanDealing : PlanPrefixSum<Wave, waves>, PlanWords {
  using Base = PlanPrefixSum<Wave, waves>;
  using Base::divide, Base::larger, Base::open, Base::round_up, Base::split_alignment, Base::threads;
  using typename Base::Shared;
  static constexpr int candidates = 16;
  static constexpr int most = 256;  // sequences, and SM parts
  static constexpr int max_turns = 8;

  // Notes of a workgroup on the sequences and on the bins, the SM parts that they are dealt to.
  struct Dealt {
    int left[most];    // blocks of SPLIT_ALIGNMENT keys of each sequence, without its chunks
    int chunks[most];  // of the sequences before each
    int row[most];     // partial rows of the sequences before each
    int order[most];   // sequences, the longest rest first
    int owner[most];   // the bin of each sequence
    int turn[most];    // in which it got it
    int place[most];   // of each bin among all in the last turn; then the bin's first work tile among those of bins
    int64_t load[most];  // cost of each bin
  };

  // The outcome of a candidate.
  struct Sizes {
    int chunk;         // blocks of SPLIT_ALIGNMENT keys
    int chunks;        // of all sequences
    int partial_rows;
    int bins;
    int turns;
    bool possible;
  };

  // Deals with the chunk of candidate `number`. The prefix sum of costs is there.
  MLA_DEVICE static Sizes deal(const PlanParams& p, Shared& s, Dealt& d, int number) {
    Sizes sizes;
    sizes.chunk = chunk_of(p, s, number);
    int all = 0;
#pragma unroll 1
    for (int base = 0; base < p.batch; base += threads) {
      const int b = base + thread_id();
      int own = 0;  // chunks, and above them whether there are any
      if (b < p.batch) {
        const int blocks = static_cast<int>((s.costs.at[b + 1] - s.costs.at[b] - p.work_tile_cost) / split_alignment);
        const int whole = blocks > 0 ? static_cast<int>(static_cast<uint32_t>(blocks - 1) / sizes.chunk) : 0;
        d.left[b] = blocks - whole * sizes.chunk;
        own = (whole < too_many ? whole : too_many) + (whole > 0 ? split_sequence : 0);
      }
      int total;
      const int before = all + s.scan.exclusive(own, total);
      if (b < p.batch) {
        d.chunks[b] = chunks_in(before);
        d.row[b] = rows_in(before);
      }
      all += total;
    }
    sizes.chunks = chunks_in(all);
    sizes.partial_rows = rows_in(all);
    sizes.bins = p.num_sm_parts - sizes.chunks;
    sizes.possible = sizes.bins > 0 && sizes.bins * max_turns >= p.batch;
    if (sizes.possible) sizes.turns = take_turns(p, d, sizes.bins);
    return sizes;
  }

  // The cost of the slowest of this thread's SM parts.
  MLA_DEVICE static int64_t slowest(const PlanParams& p, const Dealt& d, const Sizes& sizes) {
    int64_t cost = sizes.chunks > 0 ? static_cast<int64_t>(sizes.chunk) * split_alignment + p.work_tile_cost : 0;
#pragma unroll 1
    for (int bin = thread_id(); bin < sizes.bins; bin += threads) cost = larger(cost, d.load[bin]);
    return cost;
  }

  // Writes the plan of candidate `number`, but for the frame.
  MLA_DEVICE static void write(const PlanParams& p, Shared& s, Dealt& d, int number) {
    const Sizes sizes = deal(p, s, d, number);
    find_first_work_tiles(p, s, d, sizes);
    const int used = p.batch + sizes.chunks;
#pragma unroll 1
    for (int b = thread_id(); b < p.batch; b += threads) {
      const int whole = (b + 1 < p.batch ? d.chunks[b + 1] : sizes.chunks) - d.chunks[b];
      const int keys = sizes.chunk * split_alignment;
      p.plan[p.split_indptr + b] = d.row[b];
#pragma unroll 1
      for (int i = 0; i < whole; ++i) write_work_tile(p, d.chunks[b] + i, b, i * keys, (i + 1) * keys, d.row[b] + i);
      const int tile = sizes.chunks + d.place[d.owner[b]] + d.turn[b];
      write_work_tile(p, tile, b, whole * keys, open, whole > 0 ? d.row[b] + whole : -1);
    }
#pragma unroll 1
    for (int part = thread_id(); part <= p.num_sm_parts; part += threads) {
      const int bin = part - sizes.chunks;
      const bool last = part == p.num_sm_parts;
      p.plan[p.work_indptr + part] = last ? used : bin < 0 ? part : sizes.chunks + d.place[bin];
    }
#pragma unroll 1
    for (int i = used + thread_id(); i < p.work_tile_capacity; i += threads) write_work_tile(p, i, -1, 0, 0, -1);
    if (thread_id() == 0) {
      p.plan[p.split_indptr + p.batch] = sizes.partial_rows;
      write_counts(p, used, sizes.partial_rows);
    }
  }

 private:
  // Chunks of a sequence that no plan has room for. More are counted as this number.
  static constexpr int too_many = most + 1;
  // A sequence that is split counts this beside its chunks, of which all sequences have fewer.
  static constexpr int split_sequence = 1 << 18;
  static_assert(most * too_many < split_sequence, "counts do not overflow");
  MLA_DEVICE static int chunks_in(int count) { return count & (split_sequence - 1); }
  MLA_DEVICE static int rows_in(int count) { return chunks_in(count) + count / split_sequence; }

  // Blocks of SPLIT_ALIGNMENT keys of a candidate's chunk.
  MLA_DEVICE static int chunk_of(const PlanParams& p, const Shared& s, int number) {
    const int64_t fill = s.costs.at[p.batch] * (32 + number);
    const int parts = 32 * p.num_sm_parts;
    // A quotient of 64 bits takes several times as long.
    const int64_t share = fill <= 0x7fffffff ? static_cast<uint32_t>(fill) / static_cast<uint32_t>(parts)
                                             : divide(fill, int64_t{parts});
    const int64_t blocks = (round_up(share) - round_up(static_cast<int64_t>(p.work_tile_cost))) / split_alignment;
    return static_cast<int>(larger(blocks, int64_t{1}));
  }

  // Gives every bin a sequence in each turn, the longest to the bin with the lowest cost. Returns the number of turns.
  MLA_DEVICE static int take_turns(const PlanParams& p, Dealt& d, int bins) {
    block_sync();
#pragma unroll 1
    for (int b = thread_id(); b < p.batch; b += threads) d.order[rank<8, true>(d.left, p.batch, b)] = b;
#pragma unroll 1
    for (int bin = thread_id(); bin < bins; bin += threads) d.load[bin] = 0;
    block_sync();
    int turn = 0, first = 0;
#pragma unroll 1
    for (; first < p.batch; ++turn, first += bins) {
#pragma unroll 1
      for (int bin = thread_id(); bin < bins; bin += threads)
        d.place[bin] = turn == 0 ? bin : rank<8, false>(d.load, bins, bin);
      block_sync();
#pragma unroll 1
      for (int bin = thread_id(); bin < bins; bin += threads) {
        const int at = first + d.place[bin];
        if (at >= p.batch) continue;
        const int sequence = d.order[at];
        d.load[bin] += static_cast<int64_t>(d.left[sequence]) * split_alignment + p.work_tile_cost;
        d.owner[sequence] = bin;
        d.turn[sequence] = turn;
      }
      block_sync();
    }
    return turn;
  }

  // Makes `place` the first work tile of each bin among those of bins. Each has one of every turn but the last, in
  // which only the first bins got one.
  MLA_DEVICE static void find_first_work_tiles(const PlanParams& p, Shared& s, Dealt& d, const Sizes& sizes) {
    const int whole = sizes.turns - 1, taken = p.batch - whole * sizes.bins;
    int begin = 0;
#pragma unroll 1
    for (int base = 0; base < sizes.bins; base += threads) {
      const int bin = base + thread_id();
      const bool exists = bin < sizes.bins;
      int all;
      const int before = s.scan.exclusive(exists && d.place[bin] < taken ? 1 : 0, all);
      if (exists) d.place[bin] = bin * whole + begin + before;
      begin += all;
    }
    block_sync();
  }

  // How many of `count` values come before the one at `own`: larger (or smaller) ones, and equal ones before it.
  // AT_ONCE values are loaded together, because each load takes as long as several comparisons.
  template <int AT_ONCE, bool LARGEST_FIRST, class Number>
  MLA_DEVICE static int rank(const Number* values, int count, int own) {
    const Number value = values[own];
    int before = 0;
#pragma unroll AT_ONCE
    for (int i = 0; i < count; ++i) {
      const Number earlier = i < own ? 1 : 0;
      before += (LARGEST_FIRST ? values[i] + earlier > value : values[i] < value + earlier) ? 1 : 0;
    }
    return before;
  }
};

}  // namespace mla
