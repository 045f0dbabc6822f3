// The line on which plan lays sequences, one behind the other by what they cost, and cuts of it among workers.
#pragma once

#include "common/block_scan.hpp"
#include "common/params/plan.hpp"

namespace mla {

template <class Wave, int waves>
struct PlanLine {
  static constexpr int threads = waves * Wave::lanes;
  static constexpr int most_sequences = 2048;  // whose line fits in 48 KiB of shared memory beside the items
  static constexpr int most_workers = 1024;
  static constexpr int granule = 64;
  static constexpr int open = 0x7fffffff;

  struct Line {
    int64_t at[most_sequences + 1];  // where each sequence begins, and the end
    int64_t longest;                 // keys of the longest sequence, in whole granules
  };
  // A cut before key `key` of a sequence, in each family: family 0 cuts at boundaries only, so its key is 0.
  struct Cut {
    int whole;     // sequence in family 0
    int sequence;  // in family 1
    int key;
  };
  struct Shared {
    Line line;
    BlockScan<Wave, waves> scan;
  };

  template <class Number>
  MLA_DEVICE static Number larger(Number a, Number b) {
    return a > b ? a : b;
  }
  template <class Number>
  MLA_DEVICE static Number round_up(Number keys) {
    return (keys + granule - 1) / granule * granule;
  }
  // Neither is negative.
  MLA_DEVICE static int64_t divide(int64_t n, int64_t d) {
    return static_cast<int64_t>(static_cast<uint64_t>(n) / static_cast<uint64_t>(d));
  }
  template <class Number>
  MLA_DEVICE static Number quotient(Number n, Number d) {
    if constexpr (sizeof(Number) == 8)
      return divide(n, d);
    else
      return static_cast<Number>(static_cast<uint32_t>(n) / static_cast<uint32_t>(d));
  }

  // Divides 31-bit numbers by the same one again and again.
  class Divisor {
   public:
    MLA_DEVICE explicit Divisor(int d) : Divisor(d, inverse(d)) {}
    MLA_DEVICE Divisor(int d, uint32_t inverse_of_d) : d_(d), inverse_(inverse_of_d) {}

    // d times this falls short of 2^32 by d at most, so n times this / 2^32 of n / d by less than a half.
    MLA_DEVICE static uint32_t inverse(int d) { return 0xffffffffu / static_cast<uint32_t>(d); }

    MLA_DEVICE int divide(int n) const {
      const int low = static_cast<int>(static_cast<uint64_t>(n) * inverse_ >> 32);
      return low + (n - low * d_ >= d_ ? 1 : 0);
    }
    MLA_DEVICE int64_t divide(int64_t n) const { return PlanLine::divide(n, d_); }
    MLA_DEVICE int number() const { return d_; }

   private:
    int d_;
    uint32_t inverse_;
  };

  MLA_DEVICE static int64_t kv_len(const PlanParams& p, int b) {
    if (p.cu_seqlens_q != nullptr && p.cu_seqlens_q[b + 1] <= p.cu_seqlens_q[b]) return 0;
    return p.seq_lens[b];
  }

  // The line of sequences of which each costs what `cost` says; of the longest one only if asked for it.
  template <class Cost>
  MLA_DEVICE static void lay_line(const PlanParams& p, Shared& s, bool find_longest, Cost cost) {
    if (p.batch <= Wave::lanes) return lay_short_line(p, s, find_longest, cost);
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
    if (find_longest) longest = s.scan.largest(longest);
    if (thread == 0) {
      s.line.at[p.batch] = begin;
      s.line.longest = static_cast<int64_t>(longest) * granule;
    }
    block_sync();
  }

  // As many sequences as a wave has lanes: one lays them, in as many steps as they need, and the others wait once.
  template <class Cost>
  MLA_DEVICE static void lay_short_line(const PlanParams& p, Shared& s, bool find_longest, Cost cost) {
    const int b = thread_id();
    if (b < Wave::lanes) {
      int64_t end = 0;
      int longest = 0;
      if (b < p.batch) {
        const int64_t keys = kv_len(p, b);
        end = cost(keys);
        longest = static_cast<int>((keys + granule - 1) / granule);
      }
#pragma unroll 1
      for (int apart = 1; apart < p.batch; apart *= 2) {
        const int64_t other = from_lane<Wave>(end, b >= apart ? b - apart : b);
        if (b >= apart) end += other;
      }
      if (find_longest) longest = Wave::template max_over<Wave::lanes>(longest, b);
      if (b < p.batch) s.line.at[b + 1] = end;
      if (b == 0) {
        s.line.at[0] = 0;
        s.line.longest = static_cast<int64_t>(longest) * granule;
      }
    }
    block_sync();
  }

  // Whether 32 bits do for all that places and cuts are made of. Their quotients take half the time.
  MLA_DEVICE static bool is_short(const PlanParams& p, const Line& line) {
    return line.at[p.batch] * (p.item_cost + 1) <= 0x7fffffff;
  }

  // The number of sequences that end at `place` or before it.
  template <class Number>
  MLA_DEVICE static int sequence_at(const PlanParams& p, const Line& line, Number place) {
    int low = 0, high = p.batch - 1;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (static_cast<Number>(line.at[middle + 1]) <= place)
        low = middle + 1;
      else
        high = middle;
    }
    return place < static_cast<Number>(line.at[p.batch]) ? low : p.batch;
  }

  // The cuts of a candidate: those of as many workers as the divisor lie at floor(j x line / used), all others at the
  // end of the line. Both families have the same places.
  template <class Number>
  class Cuts {
   public:
    MLA_DEVICE Cuts(const PlanParams& p, const Line& line, const Divisor& used) : p_(p), line_(line), used_(used) {
      const Number all = static_cast<Number>(line.at[p.batch]);
      each_ = used.divide(all);
      left_ = static_cast<int>(all - each_ * used.number());
    }

    MLA_DEVICE Cut at(int j) const {
      j = j < used_.number() ? j : used_.number();
      const Number place = each_ * j + used_.divide(left_ * j);
      const int b = sequence_at(p_, line_, place);
      const Number begin = static_cast<Number>(line_.at[b]);
      const Number length = b < p_.batch ? static_cast<Number>(line_.at[b + 1]) - begin - p_.item_cost : 0;
      return within(b, place - begin, length);
    }

   private:
    // The cut so far into sequence b, which has `length` keys; that of the batch's number has none.
    MLA_DEVICE Cut within(int b, Number offset, Number length) const {
      const Number fixed = p_.item_cost;
      const Number crumb = round_up(fixed / 2);
      // offset x length / (length + fixed), from a product that 32 bits hold in a short line
      const Number before = offset - quotient<Number>(offset * fixed + length + fixed - 1, length + fixed);
      const Number near = (before + granule / 2) / granule * granule;
      const bool crumbs = near < crumb || length - near < crumb;
      Cut cut;
      cut.whole = b + (2 * offset > length + fixed ? 1 : 0);
      cut.sequence = b + (crumbs && 2 * near > length ? 1 : 0);
      cut.key = crumbs ? 0 : static_cast<int>(near);
      return cut;
    }

    const PlanParams& p_;
    const Line& line_;
    const Divisor used_;
    Number each_;  // the line is used x each + left
    int left_;
  };

  // The cut of the lane before this one, or of the one after it; lane 0, or the last, has no use for it.
  MLA_DEVICE static Cut of_lane(const Cut& cut, int lane) {
    Cut other;
    other.whole = Wave::from_lane(cut.whole, lane);
    other.sequence = Wave::from_lane(cut.sequence, lane);
    other.key = Wave::from_lane(cut.key, lane);
    return other;
  }
};

}  // namespace mla
