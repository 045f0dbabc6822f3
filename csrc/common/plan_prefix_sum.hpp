// The prefix sum over the costs of a batch's sequences, and the split points that divide it among SM parts.
#pragma once

#include "common/block_scan.hpp"
#include "common/params/plan.hpp"
#include "common/plan_header.hpp"
#include "common/visibility.hpp"

namespace mla {

template <class Wave, int waves>
struct PlanPrefixSum {
  static constexpr int threads = waves * Wave::lanes;
  static constexpr int most_sequences = 2048;  // whose prefix sum fits in 48 KiB of shared memory beside the tiles
  static constexpr int max_sm_parts = 1024;
  static constexpr int split_alignment = 64;
  static constexpr int open = PlanHeader::open_end;

  struct CostPrefixSum {
    int64_t at[most_sequences + 1];  // the cost of all sequences before each, and of all
    int64_t longest;                 // keys of the longest sequence, rounded up to the split alignment
  };
  // A split point before key `key` of a sequence, in each family: family 0 splits between sequences only, so its key is
  // 0.
  struct SplitPoint {
    int whole;     // sequence in family 0
    int sequence;  // in family 1
    int key;
  };
  struct Shared {
    CostPrefixSum costs;
    BlockScan<Wave, waves> scan;
  };

  template <class Number>
  MLA_DEVICE static Number larger(Number a, Number b) {
    return a > b ? a : b;
  }
  template <class Number>
  MLA_DEVICE static Number round_up(Number keys) {
    return (keys + split_alignment - 1) / split_alignment * split_alignment;
  }
  // n / d of numbers that are not negative: unsigned division takes fewer instructions.
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

  // Divides 31-bit numbers by one number many times.
  class Divisor {
   public:
    MLA_DEVICE explicit Divisor(int d) : Divisor(d, inverse(d)) {}
    MLA_DEVICE Divisor(int d, uint32_t inverse_of_d) : d_(d), inverse_(inverse_of_d) {}

    // This is below 2^32 / d by at most 1, so n x this / 2^32 is below n / d by less than a half: `divide` corrects its
    // quotient once.
    MLA_DEVICE static uint32_t inverse(int d) { return 0xffffffffu / static_cast<uint32_t>(d); }

    MLA_DEVICE int divide(int n) const {
      const int low = static_cast<int>(static_cast<uint64_t>(n) * inverse_ >> 32);
      return low + (n - low * d_ >= d_ ? 1 : 0);
    }
    MLA_DEVICE int64_t divide(int64_t n) const { return PlanPrefixSum::divide(n, d_); }
    MLA_DEVICE int number() const { return d_; }

   private:
    int d_;
    uint32_t inverse_;
  };

  // Returns the keys of a sequence from its window's origin on; none where no query token reads them.
  MLA_DEVICE static int64_t kv_len(const PlanParams& p, int b) {
    int q_len = p.q_len;
    if (p.cu_seqlens_q != nullptr) {
      q_len = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
      if (q_len <= 0) return 0;
    }
    return p.seq_lens[b] - window_origin(first_key(p.seq_lens[b], q_len, p.window_left));
  }

  // Computes the prefix sum of sequences that cost `cost(keys)` each, and the longest sequence if asked for.
  template <class Cost>
  MLA_DEVICE static void prefix_sum(const PlanParams& p, Shared& s, bool find_longest, Cost cost) {
    if (p.batch <= Wave::lanes) return prefix_sum_of_few(p, s, find_longest, cost);
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
        const int aligned_blocks = static_cast<int>((keys + split_alignment - 1) / split_alignment);
        longest = aligned_blocks > longest ? aligned_blocks : longest;
      }
      int64_t all;
      const int64_t before = s.scan.exclusive(own, all);
      if (b < p.batch) s.costs.at[b] = begin + before;
      begin += all;
    }
    if (find_longest) longest = s.scan.largest(longest);
    if (thread == 0) {
      s.costs.at[p.batch] = begin;
      s.costs.longest = static_cast<int64_t>(longest) * split_alignment;
    }
    block_sync();
  }

  // Does the same for at most as many sequences as a wave has lanes: one wave computes it, and the others wait once.
  template <class Cost>
  MLA_DEVICE static void prefix_sum_of_few(const PlanParams& p, Shared& s, bool find_longest, Cost cost) {
    const int b = thread_id();
    if (b < Wave::lanes) {
      int64_t end = 0;
      int longest = 0;
      if (b < p.batch) {
        const int64_t keys = kv_len(p, b);
        end = cost(keys);
        longest = static_cast<int>((keys + split_alignment - 1) / split_alignment);
      }
#pragma unroll 1
      for (int apart = 1; apart < p.batch; apart *= 2) {
        const int64_t other = from_lane<Wave>(end, b >= apart ? b - apart : b);
        if (b >= apart) end += other;
      }
      if (find_longest) longest = Wave::template max_over<Wave::lanes>(longest, b);
      if (b < p.batch) s.costs.at[b + 1] = end;
      if (b == 0) {
        s.costs.at[0] = 0;
        s.costs.longest = static_cast<int64_t>(longest) * split_alignment;
      }
    }
    block_sync();
  }

  // Returns whether 32 bits hold every number that split points are computed from; their quotients take half the time.
  MLA_DEVICE static bool fits_32_bits(const PlanParams& p, const CostPrefixSum& costs) {
    return costs.at[p.batch] * (p.work_tile_cost + 1) <= 0x7fffffff;
  }

  // Returns the number of sequences that end at `position` or before it.
  template <class Number>
  MLA_DEVICE static int sequence_at(const PlanParams& p, const CostPrefixSum& costs, Number position) {
    int low = 0, high = p.batch - 1;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (static_cast<Number>(costs.at[middle + 1]) <= position)
        low = middle + 1;
      else
        high = middle;
    }
    return position < static_cast<Number>(costs.at[p.batch]) ? low : p.batch;
  }

  // The split points of a candidate: those of its `used` SM parts lie at floor(j x all / used), all others at the end.
  // Both families have the same positions.
  template <class Number>
  class SplitPoints {
   public:
    MLA_DEVICE SplitPoints(const PlanParams& p, const CostPrefixSum& costs, const Divisor& used)
        : p_(p), costs_(costs), used_(used) {
      const Number all = static_cast<Number>(costs.at[p.batch]);
      each_ = used.divide(all);
      left_ = static_cast<int>(all - each_ * used.number());
    }

    MLA_DEVICE SplitPoint at(int j) const {
      j = j < used_.number() ? j : used_.number();
      const Number position = each_ * j + used_.divide(left_ * j);
      const int b = sequence_at(p_, costs_, position);
      const Number begin = static_cast<Number>(costs_.at[b]);
      const Number length = b < p_.batch ? static_cast<Number>(costs_.at[b + 1]) - begin - p_.work_tile_cost : 0;
      return within(b, position - begin, length);
    }

   private:
    // Returns the split point at this cost into sequence b of `length` keys; the one behind the last sequence has none.
    MLA_DEVICE SplitPoint within(int b, Number offset, Number length) const {
      const Number fixed = p_.work_tile_cost;
      const Number min_split = round_up(fixed / 2);
      // offset x length / (length + fixed), from a product that fits_32_bits allows for
      const Number before = offset - quotient<Number>(offset * fixed + length + fixed - 1, length + fixed);
      const Number near = (before + split_alignment / 2) / split_alignment * split_alignment;
      const bool too_short = near < min_split || length - near < min_split;
      SplitPoint point;
      point.whole = b + (2 * offset > length + fixed ? 1 : 0);
      point.sequence = b + (too_short && 2 * near > length ? 1 : 0);
      point.key = too_short ? 0 : static_cast<int>(near);
      return point;
    }

    const PlanParams& p_;
    const CostPrefixSum& costs_;
    const Divisor used_;
    Number each_;  // the sum of all costs is used x each + left
    int left_;
  };

  // The split point of the lane before this one, or of the one after it; lane 0, or the last, does not use it.
  MLA_DEVICE static SplitPoint from_lane_of(const SplitPoint& point, int lane) {
    SplitPoint other;
    other.whole = Wave::from_lane(point.whole, lane);
    other.sequence = Wave::from_lane(point.sequence, lane);
    other.key = Wave::from_lane(point.key, lane);
    return other;
  }
};

}  // namespace mla
