// Which rows, keys and columns a lane of swap_ab has. A query row is a column of S^T = K Q^T and of O^T = V^T P^T: a
// lane holds rows 8j + 2(l % 4) and the next, for each j, of both products, of sums and of factors.
#pragma once

#include "sm_90/decode/swap_ab/shared_storage.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

// The key of a stage that row `row` (of 16) of a 16 x 16 step holds: of step 0 or 1, keys 8 * step to 8 * step + 7 of
// both groups. The rows of a quad of S^T, and the lanes of a quad of V^T, have neighbouring keys, which lie 64 bytes
// further in the turn of the banks.
MLA_DEVICE int key_of_row(int step, int row) {
  const int low = row & 1, high = row >> 1 & 1;
  return (row >> 2 & 1) * 16 + step * 8 + (row >> 3) * 4 + high * 2 + (high ^ low);
}

template <class Traits>
struct LaneLayout {
  static constexpr int ROWS = Traits::ROWS;
  static constexpr int LANE_ROWS = ROWS / 4;
  static constexpr int S_REGS = ROWS / 2;  // scores of 64 keys, or a result of 64 columns

  MLA_DEVICE static int in_quad() { return warpgroup_thread() % 4; }

  // The i-th row of this lane. Its scores are s[i / 2 * 4 + i % 2], and two behind it, of a key 4 further on.
  MLA_DEVICE static int row(int i) { return i / 2 * 8 + in_quad() * 2 + i % 2; }

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
