// The plan that deals sequences to SM parts out of order (ops/plan/dealing.py): whole chunks of long sequences are SM
// parts of their own, and what is left of every sequence is dealt to the others, the longest first, in turns.
//
// Every thread has the sequence of its number, and the bin, an SM part that what is left is dealt to. There is a thread
// for each sequence, and for each bin unless every bin gets one sequence at most. Lengths are counted in blocks of
// SPLIT_ALIGNMENT keys: in the middle of a turn all bins have as many sequences, so their costs differ by blocks alone.
#pragma once

#include "common/plan_prefix_sum.hpp"
#include "common/plan_words.hpp"

namespace mla {

template <class Wave, int waves>
struct PlanDealing : PlanPrefixSum<Wave, waves>, PlanWords {
  using Base = PlanPrefixSum<Wave, waves>;
  using Base::larger, Base::open, Base::round_up, Base::split_alignment, Base::threads;
  using typename Base::CostPrefixSum, typename Base::Divisor, typename Base::Shared;
  static constexpr int candidates = 16;
  static constexpr int most = 256;  // sequences, and SM parts
  static constexpr int max_turns = 8;
  static constexpr int steps = 32;  // chunk number n fills (steps + n) / steps of an even share

  // Notes of a workgroup, in shared memory of this alignment.
  static constexpr int alignment = 16;
  struct Dealt {
    uint32_t keys[2][most];   // that threads are ranked by; those of one rank may be read during the next
    int longest_first[most];  // what is left of each sequence
    int bin[most];            // of each sequence in that order, and above it the turn
    int first_tile[most];     // of each bin, among the work tiles of bins
  };

  // This thread's sequence with a chunk.
  struct ChunkedSequence {
    int chunks;  // that the sequence gives away
    int left;    // blocks

    MLA_DEVICE ChunkedSequence(int blocks, const Divisor& chunk)
        : chunks(blocks > 0 ? chunk.divide(blocks - 1) : 0), left(blocks - chunks * chunk.number()) {}

    // The chunks, and above them whether there are any.
    MLA_DEVICE int count() const { return (chunks < too_many ? chunks : too_many) + (chunks > 0 ? split_sequence : 0); }
  };

  // All sequences with a chunk.
  struct Sizes {
    int chunks;
    int partial_rows;
    int bins;
    bool possible;

    MLA_DEVICE Sizes(const PlanParams& p, int count)
        : chunks(chunks_in(count)),
          partial_rows(rows_in(count)),
          bins(p.num_sm_parts - chunks),
          possible(bins > 0 && bins * max_turns >= p.batch) {}
  };

  // The contents of this thread's bin.
  struct Bin {
    int blocks, sequences;
  };

  // Returns the blocks of this thread's sequence.
  MLA_DEVICE static int blocks_of(const PlanParams& p, const CostPrefixSum& costs) {
    const int b = thread_id();
    return b < p.batch ? static_cast<int>((costs.at[b + 1] - costs.at[b] - p.work_tile_cost) / split_alignment) : 0;
  }

  // Returns what even shares are computed with.
  MLA_DEVICE static int share_divisor(const PlanParams& p) { return steps * p.num_sm_parts; }

  // Returns the blocks of a candidate's chunk.
  MLA_DEVICE static int chunk_of(const PlanParams& p, const CostPrefixSum& costs, const Divisor& by, int number) {
    const int64_t fill = costs.at[p.batch] * (steps + number);
    const int64_t share = fill <= 0x7fffffff ? by.divide(static_cast<int>(fill)) : by.divide(fill);
    return larger(blocks_up(share) - blocks_up(p.work_tile_cost), 1);
  }

  // The chunks of all candidates, of which each lane of a wave has one, and the blocks of this thread's sequence. They
  // are computed before it is known which candidate is the cheapest.
  class Chunks {
   public:
    MLA_DEVICE Chunks(bool wanted, const PlanParams& p, const CostPrefixSum& costs) {
      if (!wanted) return;
      blocks = blocks_of(p, costs);
      chunk_ = chunk_of(p, costs, Divisor(share_divisor(p)), thread_id() % Wave::lanes);
      inverse_ = Divisor::inverse(chunk_);
    }
    MLA_DEVICE Divisor chunk(int candidate) const {
      return {Wave::from_lane(chunk_, candidate),
              static_cast<uint32_t>(Wave::from_lane(static_cast<int>(inverse_), candidate))};
    }
    int blocks = 0;

   private:
    int chunk_ = 1;
    uint32_t inverse_ = 0;
  };

  // Returns the price of a candidate's chunk, or -1 where it leaves too few SM parts or cannot be the cheapest.
  MLA_DEVICE static int64_t price(const PlanParams& p, Shared& s, Dealt& d, const Divisor& chunk) {
    const ChunkedSequence own(blocks_of(p, s.costs), chunk);
    int longest;
    const Sizes sizes(p, s.scan.sum(own.count(), own.left, longest));
    if (!sizes.possible) return -1;
    int64_t slowest;
    if (sizes.bins >= p.batch) {
      slowest = cost(p, {longest, 1});
    } else if (costs_more(p, s.costs.at[p.batch], sizes, chunk.number(), longest)) {
      return -1;
    } else {
      const Bin bin = take_turns<false>(p, d, rank_of_sequence(p, d, own), own.left, sizes.bins);
      slowest = s.scan.largest(thread_id() < sizes.bins ? cost(p, bin) : 0);
    }
    if (sizes.chunks > 0) slowest = larger(slowest, cost(p, {chunk.number(), 1}));
    return slowest + static_cast<int64_t>(p.shared_cost) * sizes.partial_rows;
  }

  // Writes the plan of a candidate, but for the frame.
  MLA_DEVICE static void write(const PlanParams& p, Shared& s, Dealt& d, const Chunks& chunks, int candidate) {
    const int b = thread_id();
    const Divisor chunk = chunks.chunk(candidate);
    const ChunkedSequence own(chunks.blocks, chunk);
    int count;
    const int before = s.scan.exclusive(b < p.batch ? own.count() : 0, count);
    const Sizes sizes(p, count);
    const int place = rank_of_sequence(p, d, own);
    int tile = sizes.chunks + place;
    if (sizes.bins < p.batch) {
      find_first_tiles(p, s, d, take_turns<true>(p, d, place, own.left, sizes.bins), sizes.bins);
      const int taken = b < p.batch ? d.bin[place] : 0;
      tile = sizes.chunks + d.first_tile[taken % most] + taken / most;
    }
    const int used = p.batch + sizes.chunks;
    if (b < p.batch) write_sequence(p, own, chunk.number(), chunks_in(before), rows_in(before), tile);
#pragma unroll 1
    for (int part = b; part <= p.num_sm_parts; part += threads) {
      const int bin = part - sizes.chunks;
      int first = part;  // that of a chunk
      if (part == p.num_sm_parts)
        first = used;
      else if (bin >= 0)
        first = sizes.chunks + (sizes.bins < p.batch ? d.first_tile[bin] : bin < p.batch ? bin : p.batch);
      p.plan[p.work_indptr + part] = first;
    }
#pragma unroll 1
    for (int i = used + b; i < p.work_tile_capacity; i += threads) write_work_tile(p, i, -1, 0, 0, -1);
    if (b == 0) {
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

  MLA_DEVICE static int blocks_up(int64_t keys) {
    return static_cast<int>(static_cast<uint64_t>(keys + split_alignment - 1) / split_alignment);
  }
  MLA_DEVICE static int64_t cost(const PlanParams& p, const Bin& bin) {
    return static_cast<int64_t>(bin.blocks) * split_alignment + bin.sequences * p.work_tile_cost;
  }

  // Returns whether some plan in order costs no more for certain, so that turns need not be taken. `all` is the cost of
  // all sequences, unsplit.
  MLA_DEVICE static bool costs_more(const PlanParams& p, int64_t all, const Sizes& sizes, int chunk, int longest) {
    // Sequences are equally long and whole: in order, too, an SM part has at most ceil(batch / SM parts) of them.
    if (sizes.chunks == 0 && all == p.batch * cost(p, {longest, 1})) return true;
    // A split point in order lies at most a tile's cost, min_split and half of SPLIT_ALIGNMENT from its even share, so
    // that no SM part costs more than the share and twice that, its first tile included. Each split point makes a
    // partial, and each sequence another. The slowest bin costs at least the mean of all bins.
    const int tile = p.work_tile_cost, points = p.num_sm_parts - 1;
    const int beyond = 2 * (tile + round_up(tile / 2) + split_alignment / 2 + 1);
    const int more_partials = points + (p.batch < points ? p.batch : points) - sizes.partial_rows;
    const int64_t beside_share = 1 + beyond + static_cast<int64_t>(p.shared_cost) * more_partials;
    const int64_t of_bins = all - static_cast<int64_t>(sizes.chunks) * chunk * split_alignment;
    return of_bins * p.num_sm_parts > (all + beside_share * p.num_sm_parts) * sizes.bins;
  }

  // Returns this thread's sequence's place among all, the longest rest first.
  MLA_DEVICE static int rank_of_sequence(const PlanParams& p, Dealt& d, const ChunkedSequence& own) {
    return rank(d.keys[0], -own.left, p.batch);
  }

  // Gives every bin a sequence in each turn, the longest to the bin with the fewest blocks; `place` is this thread's
  // sequence's. NUMBERED says that it matters which of equal bins gets which sequence, and notes the bins. There are
  // more sequences than bins.
  template <bool NUMBERED>
  MLA_DEVICE static Bin take_turns(const PlanParams& p, Dealt& d, int place, int left, int bins) {
    const int own = thread_id();
    if (own < p.batch) d.longest_first[place] = left;
    block_sync();
    Bin bin{};
    int first = 0;
#pragma unroll 1
    for (int turn = 0; first < p.batch; ++turn, first += bins) {
      int at = first + own;
      if (turn == 1 && !NUMBERED)
        at = first + bins - 1 - own;  // the first turn's sequences get shorter from bin to bin
      else if (turn > 0)
        at = first + rank(d.keys[turn % 2], bin.blocks, bins);
      if (own >= bins) {
        bin.blocks += d.longest_first[first];  // no bin has more, so that none is ranked behind this thread
      } else if (at < p.batch) {
        bin.blocks += d.longest_first[at];
        ++bin.sequences;
        if (NUMBERED) d.bin[at] = own + turn * most;
      }
    }
    return bin;
  }

  // Finds the first work tile of each bin. All have one of every turn but the last, in which some got none.
  MLA_DEVICE static void find_first_tiles(const PlanParams& p, Shared& s, Dealt& d, const Bin& bin, int bins) {
    const int whole = static_cast<int>(static_cast<uint32_t>(p.batch - 1) / static_cast<uint32_t>(bins));
    uint32_t all;
    const int own = thread_id();
    const int more = static_cast<int>(s.scan.count_before(own < bins && bin.sequences > whole, false, 0, all));
    if (own < bins) d.first_tile[own] = own * whole + more;
    block_sync();
  }

  // Writes what is known of this thread's sequence: its chunks, which are SM parts from `first_chunk` on, and the work
  // tile of what is left. Its partial rows, if it has any, begin at `row`.
  MLA_DEVICE static void write_sequence(const PlanParams& p, const ChunkedSequence& own, int chunk, int first_chunk,
                                        int row, int tile) {
    const int b = thread_id(), keys = chunk * split_alignment;
    p.plan[p.split_indptr + b] = row;
#pragma unroll 1
    for (int i = 0; i < own.chunks; ++i) write_work_tile(p, first_chunk + i, b, i * keys, (i + 1) * keys, row + i);
    write_work_tile(p, tile, b, own.chunks * keys, open, own.chunks > 0 ? row + own.chunks : -1);
  }

  // Returns how many of the values of the first `count` threads come before this thread's: smaller ones, and equal ones
  // of threads before it. Values differ by no more than 2^25, the blocks of the longest sequence: keys, into which the
  // number of a thread among `group` of them fits, too, are compared by the sign of their difference modulo 2^32.
  // Threads from `count` on have the largest value or a larger one.
  MLA_DEVICE static int rank(uint32_t* keys, int value, int count) {
    const int own = thread_id(), lane = own % group;
    const uint32_t first = static_cast<uint32_t>(value) * group, key = first + lane;
    uint32_t before[at_once] = {};
    if (count <= group) {
#pragma unroll 1
      for (int i = 0; i < count; i += at_once) {
#pragma unroll
        for (int k = 0; k < at_once; ++k)
          before[k] += is_less(static_cast<uint32_t>(Wave::from_lane(static_cast<int>(key), i + k)), key);
      }
    } else {
      if (own < most) keys[own] = key;
      block_sync();
#pragma unroll 1
      for (int from = 0; from < count && own < most; from += group) {
        // Equal values come before this thread's in the groups before its own.
        const uint32_t limit = from + group <= own ? first + group : from > own ? first : key;
#pragma unroll
        for (int i = 0; i < group; i += at_once) {
          const auto others = *reinterpret_cast<const Vec<uint32_t, at_once>*>(keys + from + i);
#pragma unroll
          for (int k = 0; k < at_once; ++k) before[k] += is_less(others[k], limit);
        }
      }
    }
    return static_cast<int>(before[0] + before[1] + (before[2] + before[3]));
  }
  static constexpr int group = 32, at_once = 4;
  static_assert(Wave::lanes % group == 0, "a wave holds whole groups");
  MLA_DEVICE static uint32_t is_less(uint32_t a, uint32_t b) { return (a - b) >> 31; }
};

}  // namespace mla
