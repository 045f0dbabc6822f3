// The merge of two groups of waves that attended with the same query rows to different keys.
#pragma once

#include "cdna/common/lds.hpp"
#include "cdna/decode/mfma_16x16x16/accum_o.hpp"
#include "cdna/decode/softmax.hpp"

namespace cdna::mfma_16x16x16 {

// LDS of the merge: a block of output columns of each wave, then row statistics [wave][2 tiles][max, sum][16 rows].
template <class Policy>
struct KeyGroupExchange {
  static constexpr int tile_bytes = WAVE * 16;
  static constexpr int block_bytes = BLOCK_TILES * tile_bytes;
  static constexpr int row_bytes = 16 * 4;
  static constexpr int statistics = Policy::waves * block_bytes;
  static constexpr int lds_bytes = statistics + Policy::waves * 4 * row_bytes;
};

// Each wave and the wave `distance` apart hold `tiles` tiles of the same rows. Afterwards the wave of group 0 holds the
// merged tile 0 and that of group 1 the merged tile 1, each with its `max` and `sum`. The outputs are exchanged a block
// of columns at a time, so that 8 KiB of LDS per wave are enough. All waves of the workgroup call this, and they need
// another barrier before any of them writes there again.
template <class Policy, int tiles, class Row, class Output>
MLA_DEVICE void merge_key_groups(LdsBytes lds, int wave, int group, int distance, const Lane& lane,
                                 Row (&softmax)[tiles], Output (&output)[tiles]) {
  using Lds = KeyGroupExchange<Policy>;
  constexpr int tile_bytes = Lds::tile_bytes, block_bytes = Lds::block_bytes;
  constexpr int statistics = Lds::statistics, row_bytes = Lds::row_bytes;
  const LdsBytes mine = lds + statistics + wave * 4 * row_bytes + lane.column * 4;
  const LdsBytes other = lds + statistics + (wave ^ distance) * 4 * row_bytes + lane.column * 4;
  mla::block_sync();
  if (lane.group == 0) {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      lds_write_float(mine + 2 * r * row_bytes, softmax[r].max);
      lds_write_float(mine + (2 * r + 1) * row_bytes, softmax[r].sum);
    }
  }
  mla::block_sync();
  float scale[tiles], other_scale[tiles];
#pragma unroll
  for (int r = 0; r < tiles; ++r) {
    const float other_max = lds_read_float(other + 2 * r * row_bytes);
    const float max = __builtin_fmaxf(softmax[r].max, other_max);
    scale[r] = Policy::exp2(softmax[r].max - max);
    other_scale[r] = Policy::exp2(other_max - max);
    const float other_sum = lds_read_float(other + (2 * r + 1) * row_bytes);
    softmax[r].max = max;
    softmax[r].sum = softmax[r].sum * scale[r] + other_sum * other_scale[r];
  }
  const LdsBytes sent = lds + wave * block_bytes + lane.index * 16;
  const LdsBytes received = lds + (wave ^ distance) * block_bytes + lane.index * 16;
#pragma unroll
  for (int b = 0; b < Output::blocks; ++b) {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (group != r) {
#pragma unroll
        for (int t = 0; t < BLOCK_TILES; ++t) {
          pin_to_agpr(output[r].tile[b][t]);
          lds_write_f32x4(sent + t * tile_bytes, output[r].tile[b][t]);
        }
      }
    }
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (group == r) {
#pragma unroll
        for (int t = 0; t < BLOCK_TILES; ++t) {
          f32x4& x = output[r].tile[b][t];
          pin_to_agpr(x);
          x = x * scale[r] + lds_read_f32x4(received + t * tile_bytes) * other_scale[r];
          pin_to_agpr(x);
          if (t % 2 == 1) __builtin_amdgcn_sched_barrier(0);
        }
      }
    }
    if (b + 1 < Output::blocks) mla::block_sync();
  }
}

}  // namespace cdna::mfma_16x16x16
