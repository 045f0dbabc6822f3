// combine beside a decode that still runs: it merges the words of the partials as they arrive (sentinel.hpp).
//
// Blocks and warps share rows, columns and splits as in the arch's other combine kernels. Columns are taken in the
// order in which decode stores them, so that what has arrived is merged while the rest is stored.
#pragma once

#include "common/combine.hpp"
#include "sm_90/combine/sentinel.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/spin_limit.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm_90 {

template <class Shape>
struct StreamingCombine {
  using Merge = Combine<Wave, Shape>;
  using RowAssignment = typename Merge::RowAssignment;
  static constexpr int threads = Merge::threads;
  static constexpr int min_waves = Merge::min_waves;
  static constexpr int parts = Merge::parts;
  static constexpr int chunks = Merge::chunks;                    // of 128 columns, four for each lane
  static constexpr int PAUSE = 40;                                // ns between polls, which delay decode's stores
  static constexpr int MAX_SPLITS = Merge::owned * Wave::lanes;  // each has a lane that keeps its weight
  static_assert(Shape::rows == 1 && Merge::team == Wave::lanes && Shape::vec == 4 && Merge::early,
                "streaming combine: a lane holds four columns of a chunk");

  // Every sequence has num_splits splits, at most MAX_SPLITS; no sequence is skipped.
  MLA_DEVICE static void run(const CombineParams& p) {
    Wave::release_consumer();  // the next kernel waits for this launch
    RowAssignment at;
    const uint32_t sequence =
        Merge::team_of(p, static_cast<uint32_t>(block_id_x()), static_cast<uint32_t>(p.batch), at);
    Merge::resolve_splits(p, sequence, at);
    Merge::materialize_params(p);
    // decode lets this kernel start after its own wait, so the sinks are there.
    const float sink = at.sink == nullptr ? 0.0f : *at.sink;
    wait_for_own(p, at);
    float share[Merge::owned];
    const LseAccum row = Merge::merge_own_lse(p, at, share);
    Merge::write_lse(p, at, row);  // while decode stores its partials
    float scale;
    const auto outcome = Merge::find_scale(p, row, scale, [&] { return sink; });
    for (int i = 0; i < Merge::owned; ++i) share[i] *= scale;
    float sum[chunks][4] = {};
    if (outcome == Merge::SUM) {
#pragma unroll 1
      for (int split = at.part; split < at.splits; split += 8 * parts) {
        const int left = at.splits - split;
        if (left <= 2 * parts)
          accumulate<2>(p, at, split, share, sum);
        else if (left <= 4 * parts)
          accumulate<4>(p, at, split, share, sum);
        else
          accumulate<8>(p, at, split, share, sum);
      }
    }
    write_out(p, at, outcome, sum);
    Wave::wait_for_producer();  // the next kernel relies on the end of decode, too
  }

 private:
  // Waits for the log-sum-exps of the lane's splits. One warp of the block polls, and only one of its lanes until the
  // first has arrived: polling competes with decode's stores.
  MLA_DEVICE static void wait_for_own(const CombineParams& p, RowAssignment& at) {
    MLA_SHARED float all[MAX_SPLITS];
    if (at.part == 0 && at.splits > 0) {
      if (at.lane == 0) wait_for_lse(p, at, at.splits - 1);
      __syncwarp();
      for (int split = at.lane; split < at.splits; split += Wave::lanes) all[split] = wait_for_lse(p, at, split);
    }
    block_sync();
    for (int i = 0; i < Merge::owned; ++i) {
      const int split = Merge::own_split(at, i);
      at.own[i] = split < at.splits ? all[split] : ordered_int_to_float(ORDERED_MINUS_INFINITY);
    }
  }

  // How long a wait may take, 0 for ever. It comes as `workgroups`, which this kernel has no other use for.
  MLA_DEVICE static int seconds(const CombineParams& p) { return p.workgroups; }

  MLA_DEVICE static float wait_for_lse(const CombineParams& p, const RowAssignment& at, int split) {
    const float* from = Merge::lse_at(p, at, split);
    TimeLimit limit("decode has stored the log-sum-exp of a partial", seconds(p));
    uint32_t word;
    do word = static_cast<uint32_t>(ld_relaxed_gpu(reinterpret_cast<const int32_t*>(from)));
    while (word == SENTINEL && limit.again());
    return bit_cast<float>(word);
  }

  // The first of a lane's four columns of a chunk. Chunks and slices follow the order in which decode stores columns:
  // in `runs` runs side by side.
  MLA_DEVICE static int column(const RowAssignment& at, int chunk) {
    constexpr int lanes = Wave::lanes / Shape::runs;
    const int slice = at.first_column / Merge::columns;
    return at.lane / lanes * (Shape::head_dim_v / Shape::runs) +
           ((slice * chunks + chunk) * lanes + at.lane % lanes) * 4;
  }

  // Adds weight x partial of this warp's next splits from `begin` on. They are waited for together.
  template <int in_flight>
  MLA_DEVICE static void accumulate(const CombineParams& p, const RowAssignment& at, int begin,
                                    const float (&share)[Merge::owned], float (&sum)[chunks][4]) {
    const float* row = p.partial_out + ((at.first + begin) * p.partial_split_stride + at.row * p.partial_row_stride);
    const int64_t apart = parts * p.partial_split_stride;
    float weight[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const int split = begin + i * parts;
      weight[i] = split < at.splits ? Merge::weight_of(at, share, split) : 0.0f;
    }
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const float* from = row + column(at, c);
      uint4 words[in_flight];
#pragma unroll
      for (int i = 0; i < in_flight; ++i) {
        // A split of weight zero contributes nothing, whatever it holds, so it is not waited for.
        const uint32_t word = bit_cast<int>(weight[i]) != 0 ? SENTINEL : 0;
        words[i] = make_uint4(word, word, word, word);
      }
      TimeLimit limit("decode has stored the columns of a partial", seconds(p));
      while (load_missing(from, apart, words) && limit.again()) __nanosleep(PAUSE);
#pragma unroll
      for (int i = 0; i < in_flight; ++i) add(weight[i], words[i], sum[c]);
    }
  }

  // Loads again what has not arrived; returns whether anything is still missing in any lane.
  template <int in_flight>
  MLA_DEVICE static bool load_missing(const float* from, int64_t apart, uint4 (&words)[in_flight]) {
#pragma unroll
    for (int i = 0; i < in_flight; ++i)
      if (incomplete(words[i])) words[i] = ld_relaxed_gpu_v4(from + i * apart);
    bool missing = false;
#pragma unroll
    for (int i = 0; i < in_flight; ++i) missing |= incomplete(words[i]);
    return __any_sync(~0u, missing);
  }

  MLA_DEVICE static void add(float weight, const uint4& words, float (&sum)[4]) {
    sum[0] = __fmaf_rn(weight, bit_cast<float>(words.x), sum[0]);
    sum[1] = __fmaf_rn(weight, bit_cast<float>(words.y), sum[1]);
    sum[2] = __fmaf_rn(weight, bit_cast<float>(words.z), sum[2]);
    sum[3] = __fmaf_rn(weight, bit_cast<float>(words.w), sum[3]);
  }

  // Adds the sums of all warps and stores the results.
  MLA_DEVICE static void write_out(const CombineParams& p, const RowAssignment& at, typename Merge::Outcome outcome,
                                const float (&sum)[chunks][4]) {
    alignas(16) MLA_SHARED float4 sums[parts][chunks][Wave::lanes];
#pragma unroll
    for (int c = 0; c < chunks; ++c)
      sums[at.part][c][at.lane] = make_float4(sum[c][0], sum[c][1], sum[c][2], sum[c][3]);
    block_sync();
    if (!at.wanted || at.part >= chunks) return;
    float total[4] = {};
#pragma unroll
    for (int other = 0; other < parts; ++other) {
      const float4 some = sums[other][at.part][at.lane];
      total[0] += some.x;
      total[1] += some.y;
      total[2] += some.z;
      total[3] += some.w;
    }
    const int64_t out = at.token * p.out_token_stride + at.head * p.out_head_stride;
    Merge::store(p, out + column(at, at.part), outcome, total);
  }

  MLA_DEVICE static bool incomplete(const uint4& words) {
    return words.x == SENTINEL || words.y == SENTINEL || words.z == SENTINEL || words.w == SENTINEL;
  }
};

}  // namespace mla::sm_90
