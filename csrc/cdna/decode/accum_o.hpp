// The accumulator of O of one 16-row tile of queries.
#pragma once

#include "cdna/common/accum_registers.hpp"

namespace cdna {

// O^T of 16 rows of `columns` values. A lane holds elements of row lane.column; which columns they are is up to the
// operands of PV, and is written there.
template <int columns>
struct AccumO {
  static constexpr int tiles = columns / 16;
  f32x4 tile[tiles];

  MLA_DEVICE void clear() {
    // A constant zero would be kept in registers from one work tile to the next.
    const float zero = mla::bit_cast<float>(rematerialized(0));
#pragma unroll
    for (int t = 0; t < tiles; ++t) tile[t] = f32x4{zero, zero, zero, zero};
  }
  // Multiplies the output by `alpha`. The last `in_vgpr` tiles are kept in VGPRs by their owner.
  template <int in_vgpr = 0>
  MLA_DEVICE void scale(float alpha) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      if (t < tiles - in_vgpr) pin_to_agpr(tile[t]);
      tile[t] *= alpha;
      if (t < tiles - in_vgpr) pin_to_agpr(tile[t]);
      if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or all tiles pass through VGPRs at once
    }
  }
};

}  // namespace cdna
