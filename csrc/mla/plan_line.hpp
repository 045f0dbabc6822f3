// The line on which plan lays sequences, one behind the other by what they cost, and cuts of it among workers.
#pragma once

#include "mla/block_scan.hpp"
#include "mla/params/plan.hpp"

namespace mla {

template <class Wave, int waves>
struct PlanLine {
  static constexpr int threads = waves * Wave::lanes;
  static constexpr int most_sequences = 2048;  // whose line fits in 48 KiB of shared memory beside the cuts
  static constexpr int most_workers = 1024;
  static constexpr int granule = 64;
  static constexpr int open = 0x7fffffff;

  struct Line {
    int64_t at[most_sequences + 1];  // where each sequence begins, and the end
    int64_t longest;                 // keys of the longest sequence, in whole granules
  };
  // A cut before key `key` of a sequence, in each family: family 0 cuts at boundaries only, so its key is 0.
  struct Cuts {
    int whole[most_workers + 1];     // sequence in family 0
    int sequence[most_workers + 1];  // in family 1
    int key[most_workers + 1];
  };
  struct Shared {
    Line line;
    Cuts cuts;
    BlockScan<Wave, waves> scan;
  };

  MLA_DEVICE static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  MLA_DEVICE static int64_t round_up(int64_t keys) { return (keys + granule - 1) / granule * granule; }
  MLA_DEVICE static int64_t divide(int64_t n, int64_t d) {  // neither is negative
    return static_cast<int64_t>(static_cast<uint64_t>(n) / static_cast<uint64_t>(d));
  }

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

  // The number of sequences that end at `place` or before it.
  MLA_DEVICE static int sequence_at(const PlanParams& p, const Line& line, int64_t place) {
    int low = 0, high = p.batch;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (line.at[middle + 1] <= place)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  // Cuts 0..workers of the candidate that uses `used` workers.
  MLA_DEVICE static void place_cuts(const PlanParams& p, Shared& s, int used) {
    const int64_t total = s.line.at[p.batch], fixed = p.item_cost;
    const int64_t crumb = round_up(fixed / 2);
#pragma unroll 1
    for (int j = thread_id(); j <= p.workers; j += threads) {
      const int64_t place = divide(total * (j < used ? j : used), used);
      const int b = sequence_at(p, s.line, place);
      const int64_t offset = place - s.line.at[b];
      const int64_t length = b < p.batch ? s.line.at[b + 1] - s.line.at[b] - fixed : 0;
      const int64_t near = (divide(offset * length, length + fixed) + granule / 2) / granule * granule;
      const bool crumbs = near < crumb || length - near < crumb;
      s.cuts.whole[j] = b + (2 * offset > length + fixed ? 1 : 0);
      s.cuts.sequence[j] = b + (crumbs && 2 * near > length ? 1 : 0);
      s.cuts.key[j] = crumbs ? 0 : static_cast<int>(near);
    }
    block_sync();
  }
};

}  // namespace mla
