// combine of few rows, beside a decode that still runs: it merges the words of the partials as they come (awaited.hpp).
//
// Workgroups, warps and lanes share rows, splits and columns as on the arch's other combine kernels.
#pragma once

#include "mla/combine.hpp"
#include "sm_90/awaited.hpp"
#include "sm_90/mbarrier.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm90 {

template <class Shape>
struct AwaitingCombine {
  using Wave = ::sm_90::Wave;
  using Merge = Combine<Wave, Shape>;
  using Place = typename Merge::Place;
  static constexpr int threads = Merge::threads;
  static constexpr int min_waves = Merge::min_waves;
  static constexpr int parts = Merge::parts;
  static constexpr int in_flight = 8;                             // splits of a warp that are waited for together
  static constexpr int MOST_SPLITS = Merge::owned * Wave::lanes;  // each has a lane that keeps its weight
  static_assert(Shape::rows == 1 && Merge::team == Wave::lanes && Merge::chunks == 1 && Shape::vec == 4 && Merge::early,
                "awaiting combine: a warp holds four columns a lane of a row's splits");

  // `splits` of a sequence are at most MOST_SPLITS, and num_splits says how many; no sequence is skipped.
  MLA_DEVICE static void run(const CombineParams& p) {
    Wave::release_consumer();  // who follows waits for this launch
    Place at;
    const uint32_t sequence =
        Merge::team_of(p, static_cast<uint32_t>(block_id_x()), static_cast<uint32_t>(p.batch), at);
    Merge::locate(p, sequence, at);
    await_own(p, at);
    float share[Merge::owned];
    const Merged row = Merge::merge_own(p, at, share);
    float scale;
    const auto outcome = Merge::begin(p, at, row, scale);
    for (int i = 0; i < Merge::owned; ++i) share[i] *= scale;
    float sum[1][4] = {};
    if (outcome == Merge::SUM)
#pragma unroll 1
      for (int split = at.part; split < at.splits; split += parts * in_flight) accumulate(p, at, split, share, sum[0]);
    Merge::finish(p, at, outcome, sum);
    Wave::wait_for_producer();  // who follows counts on the end of decode, too
  }

 private:
  // The log-sum-exps of the lane's splits, once they are there. One lane of the workgroup looks until one is: what many
  // load again and again, decode waits for.
  MLA_DEVICE static void await_own(const CombineParams& p, Place& at) {
    if (thread_id() == 0 && at.splits > 0) await_lse(p, at, at.splits - 1);
    block_sync();
    for (int i = 0; i < Merge::owned; ++i) {
      const int split = Merge::own_split(at, i);
      at.own[i] = split < at.splits ? await_lse(p, at, split) : of_order(ORDER_OF_NOTHING);
    }
    __syncwarp();
  }

  MLA_DEVICE static float await_lse(const CombineParams& p, const Place& at, int split) {
    const float* from = Merge::lse_at(p, at, split);
    uint32_t word;
    do word = static_cast<uint32_t>(load_past_l1(reinterpret_cast<const int32_t*>(from)));
    while (word == NOT_YET);
    return bit_cast<float>(word);
  }

  // Adds weight x partial of this warp's splits from `begin` on.
  MLA_DEVICE static void accumulate(const CombineParams& p, const Place& at, int begin,
                                    const float (&share)[Merge::owned], float (&sum)[4]) {
    const float* from = p.partial_out + ((at.first + begin) * p.partial_split_stride + at.row * p.partial_row_stride +
                                         at.first_column + at.lane * 4);
    const int64_t apart = parts * p.partial_split_stride;
    float weight[in_flight];
    uint4 words[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const int split = begin + i * parts;
      weight[i] = split < at.splits ? Merge::weight_of(at, share, split) : 0.0f;
      // A split of weight zero counts for nothing, whatever it holds.
      words[i] =
          bit_cast<int>(weight[i]) != 0 ? make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET) : make_uint4(0, 0, 0, 0);
    }
    // One lane looks for the first that is missing; when it is there, all ask for what they miss.
    for (;;) {
      int missing = in_flight;
      unsigned lanes = 0;
#pragma unroll
      for (int i = in_flight - 1; i >= 0; --i) {
        if (incomplete(words[i])) words[i] = load_arriving(from + i * apart);
      }
#pragma unroll
      for (int i = in_flight - 1; i >= 0; --i) {
        const unsigned now = __ballot_sync(~0u, incomplete(words[i]));
        if (now != 0) {
          missing = i;
          lanes = now;
        }
      }
      if (lanes == 0) break;
      if (at.lane == __ffs(lanes) - 1)
        while (incomplete(load_arriving(from + missing * apart))) {
        }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      sum[0] = __fmaf_rn(weight[i], bit_cast<float>(words[i].x), sum[0]);
      sum[1] = __fmaf_rn(weight[i], bit_cast<float>(words[i].y), sum[1]);
      sum[2] = __fmaf_rn(weight[i], bit_cast<float>(words[i].z), sum[2]);
      sum[3] = __fmaf_rn(weight[i], bit_cast<float>(words[i].w), sum[3]);
    }
  }

  MLA_DEVICE static bool incomplete(const uint4& words) {
    return words.x == NOT_YET || words.y == NOT_YET || words.z == NOT_YET || words.w == NOT_YET;
  }
};

}  // namespace mla::sm90
