// The accumulator of O of one 16-row tile of queries.
#pragma once

#include "cdna/common/accum_registers.hpp"

namespace cdna::mfma_16x16x16 {

constexpr int BLOCK_COLUMNS = 128;  // output columns that one transposed read brings
constexpr int BLOCK_TILES = 8;

// O^T of 16 rows. tile[b][t]: element r of a lane is column 128 b + 8 * (4 * lane.group + r) + t of row lane.column.
template <int columns>
struct AccumO {
  static constexpr int blocks = columns / BLOCK_COLUMNS;
  f32x4 tile[blocks][BLOCK_TILES];

  MLA_DEVICE void clear() {
    // A constant zero would be kept in registers from one work tile to the next.
    const float zero = mla::bit_cast<float>(rematerialized(0));
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int t = 0; t < BLOCK_TILES; ++t) tile[b][t] = f32x4{zero, zero, zero, zero};
  }
  // Multiplies the output by `alpha`. The last `in_vgpr` tiles are kept in VGPRs by their owner.
  template <int in_vgpr = 0>
  MLA_DEVICE void scale(float alpha) {
#pragma unroll
    for (int n = 0; n < blocks * BLOCK_TILES; ++n) {
      f32x4& x = tile[n / BLOCK_TILES][n % BLOCK_TILES];
      const bool in_agpr = n < blocks * BLOCK_TILES - in_vgpr;
      if (in_agpr) pin_to_agpr(x);
      x *= alpha;
      if (in_agpr) pin_to_agpr(x);
      if (n % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or all tiles pass through VGPRs at once
    }
  }
};

}  // namespace cdna::mfma_16x16x16
