// Which rows, keys and columns a lane has with keys as the first operand. A query row is a column of S^T = K Q^T and of
// O^T = V^T P^T: a lane holds rows 8j + 2(l % 4) and the next, for each j, of both products, of sums and of factors.
#pragma once

#include "sm_90/decode/swap_ab/shared_storage.hpp"
#include "sm_90/decode/softmax.hpp"

namespace mla::sm_90 {

// The key of a stage that row `row` (of 16) of a 16 x 16 step holds: of step 0 or 1, keys 8 * step to 8 * step + 7 of
// both groups. The rows of a quad of S^T, and the lanes of a quad of V^T, have neighbouring keys, which lie 64 bytes
// further in the turn of the banks.
MLA_DEVICE int key_of_row(int step, int row) {
  const int low = row & 1, high = row >> 1 & 1;
  return (row >> 2 & 1) * 16 + step * 8 + (row >> 3) * 4 + high * 2 + (high ^ low);
}

// What decode and sparse decode share.
template <int ROWS_>
struct SwapAbLanes {
  static constexpr int ROWS = ROWS_;
  static constexpr int LANE_ROWS = ROWS / 4;
  static constexpr int S_REGS = ROWS / 2;  // scores of 64 keys, or a result of 64 columns

  MLA_DEVICE static int in_quad() { return warpgroup_thread() % 4; }
  MLA_DEVICE static int quad() { return warpgroup_thread() % 32 / 4; }

  // The i-th row of this lane. Its scores are s[i / 2 * 4 + i % 2], and two behind it, of the lane's second key.
  MLA_DEVICE static int row(int i) { return i / 2 * 8 + in_quad() * 2 + i % 2; }

  // P = 2^(S * scale - running max) to shared memory, and its sums over this lane's keys. `p()` is where a warp's 16
  // keys of P go, in cores of 8 rows x 8 keys: [8 keys][8 rows][row][key]. It is called behind the lane's number, since
  // an address found before takes other registers. `scale_and_max(pair, ..)` gives those of two rows. Returns whether P
  // is so large that the running max must be raised.
  template <class Element, class At, class ScaleAndMax>
  MLA_DEVICE static bool exponentiate(const float (&s)[S_REGS], const At& p, const ScaleAndMax& scale_and_max,
                                      float (&sum)[LANE_ROWS]) {
    const int lane = warpgroup_thread() % 32;
    const uint32_t to = p() + lane / 8 % 2 * (ROWS / 8 * 128) + lane / 16 * 128 + lane % 8 * 16;
    bool outgrown = false;
#pragma unroll
    for (int j = 0; j < LANE_ROWS / 2; j += 2) {
      uint32_t matrices[4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int pair = j + part;
        float scale[2], max[2], values[4];
        scale_and_max(pair, scale, max);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = exp2_approx(fmaf(s[4 * pair + i], scale[i % 2], -max[i % 2]));
        sum[2 * pair] = values[0] + values[2];
        sum[2 * pair + 1] = values[1] + values[3];
        outgrown |= sum[2 * pair] > RESCALE_THRESHOLD || sum[2 * pair + 1] > RESCALE_THRESHOLD;
        matrices[2 * part] = pack_pair<Element>(values[0], values[1]);
        matrices[2 * part + 1] = pack_pair<Element>(values[2], values[3]);
      }
      stmatrix_trans_x4(to + j * 128, matrices);
    }
    return outgrown;
  }
};

template <class Traits>
struct LaneLayout : SwapAbLanes<Traits::ROWS> {
  using SwapAbLanes<Traits::ROWS>::ROWS;
  using SwapAbLanes<Traits::ROWS>::in_quad;

  // The first of the two rows whose sums this lane keeps: KEPT_LANES neighbouring lanes keep those of the same 8 rows.
  static constexpr int KEPT_LANES = 32 / (ROWS / 8);
  MLA_DEVICE static int kept_row() { return warpgroup_thread() % 32 / KEPT_LANES * 8 + in_quad() * 2; }

  // Bytes from a stage's beginning to one of its keys.
  MLA_DEVICE static int key_offset(int key) {
    return key / 16 * Traits::GROUP_BYTES + key % 16 * Traits::HEAD_DIM_QK;
  }

  // Adds up over lanes the values that they have for the same row: a lane sends the half of its values that it does not
  // keep, until two are left, those of `kept_row` and the next.
  template <int N>
  MLA_DEVICE static void add_over_lanes(const float (&values)[N], float (&kept)[2], int lane_bit = 16) {
    if constexpr (N == 2) {
      kept[0] = values[0];
      kept[1] = values[1];
    } else {
      const bool upper = (warpgroup_thread() & lane_bit) != 0;
      float half[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const float sent = upper ? values[i] : values[i + N / 2];
        half[i] = (upper ? values[i + N / 2] : values[i]) + __shfl_xor_sync(~0u, sent, lane_bit);
      }
      add_over_lanes(half, kept, lane_bit / 2);
    }
  }

  // Eight columns of the lane's four keys of a step of V^T: [half of the step][key][word]. `first` has the offsets of
  // the first two keys.
  MLA_DEVICE static void load_values(uint32_t stage, const uint32_t (&first)[2], uint32_t (&stored)[2][2][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int key = 0; key < 2; ++key)
        ld_shared_v2(stage + first[key] + half * 4 * Traits::HEAD_DIM_QK, stored[half][key]);
  }
};

}  // namespace mla::sm_90
