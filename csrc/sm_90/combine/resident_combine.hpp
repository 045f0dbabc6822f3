// combine behind a decode with a plan: at most one block an SM, whose warps walk the rows that the plan split and that
// decode has not merged to the end.
//
// The plan is read before decode ends. A block that finds no row for itself leaves at once, because the next kernel's
// blocks begin where SMs are free; the first block alone then waits for decode. Behind decode a row takes two steps: its
// log-sum-exps are loaded together with its first partials, then come the rest of these.
#pragma once

#include "common/plan_header.hpp"
#include "sm_90/combine/merged_rows.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

template <int HEAD_DIM_V, int WARPS>
class ResidentCombine {
  // A warp has a row, and a lane four columns of every 128.
  struct Shape {
    static constexpr int head_dim_v = HEAD_DIM_V, rows = 1, vec = 4, waves = 1, slices = 1;
  };
  using Merge = Combine<Wave, Shape>;
  using RowAssignment = typename Merge::RowAssignment;
  static constexpr int chunks = Merge::chunks;
  static constexpr int MAX_LISTED = 2048;    // sequences that are looked at together
  static constexpr int MAX_PARTIALS = 2048;  // of which it is known in advance whether they are empty

 public:
  static constexpr int threads = WARPS * Wave::lanes;
  static constexpr int min_waves = 4;

  MLA_DEVICE static void run(const CombineParams& p) {
    MLA_SHARED Shared s;
    Wave::release_consumer();  // the next kernel waits for this launch, and so for decode
#pragma unroll 1
    for (int begin = 0; begin < p.batch; begin += MAX_LISTED) {
      const int rows = list_sequences(p, s, begin) * p.q_len * p.heads;
      const bool last = p.batch - begin <= MAX_LISTED, waits = begin == 0 && block_id_x() == 0;
      if (last && block_id_x() >= rows && !waits) return;
      walk(p, s, rows);
      block_sync();  // the next list overwrites this one
    }
  }

 private:
  // A sequence with partials.
  struct Sequence {
    int number;
    int first;  // its first partial
    int splits;
  };
  struct Shared {
    Sequence list[MAX_LISTED];
    int whole[MAX_LISTED / 32];    // a bit for each sequence that decode has merged
    int empty[MAX_PARTIALS / 32];  // a bit for each partial that is part of the one before
    int counts[WARPS];
  };

  MLA_DEVICE static bool has_bit(const int* words, int n) { return words[n / 32] >> n % 32 & 1; }
  MLA_DEVICE static void set_bit(int* words, int n) { Wave::set_bits(words + n / 32, 1 << n % 32); }
  MLA_DEVICE static bool may_be_merged(const CombineParams& p) { return p.skip_none == MergedRows::MAY_BE_MERGED; }

  // Lists the sequences from `begin` on whose partials are to be combined; returns how many. The plan is older than
  // decode, whose blocks have all waited for the kernels before them.
  MLA_DEVICE static int list_sequences(const CombineParams& p, Shared& s, int begin) {
    const int end = p.batch - begin < MAX_LISTED ? p.batch : begin + MAX_LISTED;
    Sequence own = partials_of(p, begin + thread_id(), end);
    if (may_be_merged(p)) mark_merged(p, s, begin);
    const int lane = thread_id() % Wave::lanes, warp = thread_id() / Wave::lanes;
    int listed = 0;
#pragma unroll 1
    for (int base = begin;;) {
      const bool wanted = own.splits > 0 && !(may_be_merged(p) && has_bit(s.whole, own.number - begin));
      int of_warp;
      int place = listed + Wave::count_before(wanted, lane, of_warp);
      if (lane == 0) s.counts[warp] = of_warp;
      block_sync();
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const int count = s.counts[w];
        place += w < warp ? count : 0;
        listed += count;
      }
      if (wanted) s.list[place] = own;
      block_sync();
      base += threads;
      if (base >= end) return listed;
      own = partials_of(p, base + thread_id(), end);
    }
  }

  // The partials of a sequence; none from `end` on.
  MLA_DEVICE static Sequence partials_of(const CombineParams& p, int sequence, int end) {
    if (sequence >= end) return {sequence, 0, 0};
    const int first = ld_relaxed_gpu(p.split_indptr + sequence);
    return {sequence, first, ld_relaxed_gpu(p.split_indptr + sequence + 1) - first};
  }

  // Marks what decode's clusters merge (decode/plan_pair.hpp): each thread looks at a place where two SM parts meet.
  // `num_splits` is the number of SM parts that decode walks at once.
  MLA_DEVICE static void mark_merged(const CombineParams& p, Shared& s, int begin_listed) {
    const int32_t* plan = p.split_indptr - PlanHeader::words;
    const int parts = ld_relaxed_gpu(plan + PlanHeader::num_sm_parts);
    const int work_tiles = ld_relaxed_gpu(plan + PlanHeader::work_tiles);
    const int split_size = ld_relaxed_gpu(plan + PlanHeader::split_size);
#pragma unroll 1
    for (int i = thread_id(); i < MAX_LISTED / 32; i += threads) s.whole[i] = 0;
#pragma unroll 1
    for (int i = thread_id(); i < MAX_PARTIALS / 32; i += threads) s.empty[i] = 0;
    block_sync();
#pragma unroll 1
    for (int part = 2 * thread_id(); part + 1 < p.num_splits; part += 2 * threads) {
      // Past the plan's parts a bound reads some other word of the plan.
      const int32_t* bounds = plan + PlanHeader::work_indptr_at(p.batch) + part;
      const int begin = ld_relaxed_gpu(bounds), middle = ld_relaxed_gpu(bounds + 1), end = ld_relaxed_gpu(bounds + 2);
      if (parts > p.num_splits || split_size != 0 || part + 1 >= parts) continue;
      if (begin >= middle || middle >= end) continue;
      const int32_t* second = plan + work_tiles + PlanHeader::work_tile_words * middle;
      const int32_t* first = second - PlanHeader::work_tile_words;
      const int sequence = ld_relaxed_gpu(first), first_key = ld_relaxed_gpu(first + 1);
      const int other = ld_relaxed_gpu(second), end_key = ld_relaxed_gpu(second + 2), row = ld_relaxed_gpu(second + 3);
      if (sequence != other) continue;
      const bool whole = first_key == 0 && end_key == PlanHeader::open_end;
      const uint32_t listed = sequence - begin_listed;
      if (whole && listed < MAX_LISTED)
        set_bit(s.whole, listed);
      else if (!whole && row < MAX_PARTIALS)
        set_bit(s.empty, row);
    }
    block_sync();
  }

  // Merges every `workgroups x WARPS`-th of the listed sequences' rows. Neighbouring rows are in different blocks, so that
  // few rows spread over all SMs.
  MLA_DEVICE static void walk(const CombineParams& p, const Shared& s, int rows) {
    int number = thread_id() / Wave::lanes * p.workgroups + block_id_x();
    RowAssignment at;
    uint32_t full = 0;
    if (number < rows) full = find_row(p, s, number, at);
    Wave::materialize(p.partial_out, p.partial_row_stride);
    Wave::wait_for_producer();
#pragma unroll 1
    while (number < rows) {
      if (at.wanted) merge(p, at, full);
      number += p.workgroups * WARPS;
      if (number < rows) full = find_row(p, s, number, at);
    }
  }

  // Fills in a row of the listed sequences; returns which of its first 32 splits have data of their own.
  MLA_DEVICE static uint32_t find_row(const CombineParams& p, const Shared& s, int number, RowAssignment& at) {
    const int index = static_cast<int>(divided(number, p.rows_reciprocal, p.rows_shift));
    const Sequence sequence = s.list[index];
    at.lane = at.member = thread_id() % Wave::lanes;
    at.index = at.part = at.first_column = 0;
    at.row = number - index * p.q_len * p.heads;
    at.token = static_cast<int>(divided(at.row, p.heads_reciprocal, p.heads_shift));
    at.head = at.row - at.token * p.heads;
    at.first = sequence.first;
    at.splits = sequence.splits;
    at.wanted = true;
    Merge::resolve_rows(p, sequence.number, at);
    const int partial = sequence.first + at.lane;
    const bool empty = may_be_merged(p) && partial < MAX_PARTIALS && has_bit(s.empty, partial);
    return __ballot_sync(~0u, at.lane < at.splits && !empty);
  }

  // Some splits of a row, and this lane's columns of them.
  struct Loaded {
    static constexpr int MOST = 4;  // splits, in 64 registers
    int split[MOST];                // -1: none
    Vec<float, 4> columns[MOST][chunks];

    // Loads the first splits of `wanted`, counted from split `begin` of the row.
    MLA_DEVICE void load(const CombineParams& p, const RowAssignment& at, int begin, uint32_t wanted) {
      const float* row = p.partial_out + ((at.first + begin) * p.partial_split_stride +
                                          at.row * p.partial_row_stride + at.lane * 4);
#pragma unroll
      for (int i = 0; i < MOST; ++i, wanted &= wanted - 1) {
        split[i] = __ffs(wanted) - 1;
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          columns[i][c] = {};
          const float* from = row + split[i] * p.partial_split_stride + c * (4 * Wave::lanes);
          if (split[i] >= 0) columns[i][c] = *reinterpret_cast<const Vec<float, 4>*>(from);
        }
      }
    }

    // Adds them by their weights, of which lane i has that of split i. Data of weight zero is ignored.
    MLA_DEVICE void add(float weights, float (&sum)[chunks][4]) const {
#pragma unroll
      for (int i = 0; i < MOST; ++i) {
        const float weight = split[i] < 0 ? 0.0f : __shfl_sync(~0u, weights, split[i]);
        if (bit_cast<int>(weight) == 0) continue;
#pragma unroll
        for (int c = 0; c < chunks; ++c)
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[c][k] = __builtin_fmaf(weight, columns[i][c][k], sum[c][k]);
      }
    }

    MLA_DEVICE static uint32_t without_loaded(uint32_t wanted) {
#pragma unroll
      for (int i = 0; i < MOST; ++i) wanted &= wanted - 1;
      return wanted;
    }
  };

  // One row; `left` are those of its first 32 splits that are still to be added.
  MLA_DEVICE static void merge(const CombineParams& p, RowAssignment& at, uint32_t left) {
    Loaded loaded;
    Merge::read_own(p, at);
    loaded.load(p, at, 0, left);
    float share[Merge::owned];
    const LseAccum row = Merge::merge_own_lse(p, at, share);
    Merge::write_lse(p, at, row);
    float scale, sum[chunks][4] = {};
    const auto outcome = Merge::find_scale(p, row, scale, [&] { return *Merge::sink_at(p, at); });
    float weights = outcome == Merge::SUM ? share[0] * scale : 0.0f;
#pragma unroll 1
    for (int begin = 0; outcome == Merge::SUM;) {
      loaded.add(weights, sum);
      left = Loaded::without_loaded(left);
      if (left == 0) {
        begin += Wave::lanes;
        if (begin >= at.splits) break;
        weights = exp_of<Wave>(Merge::lse_of(p, at, begin + at.lane) - row.base()) * scale;
        left = __ballot_sync(~0u, bit_cast<int>(weights) != 0);
      }
      loaded.load(p, at, begin, left);
    }
    const int64_t out = at.token * p.out_token_stride + at.head * p.out_head_stride + at.lane * 4;
    for (int c = 0; c < chunks; ++c) Merge::store(p, out + c * (4 * Wave::lanes), outcome, sum[c]);
  }
};

}  // namespace mla::sm_90
