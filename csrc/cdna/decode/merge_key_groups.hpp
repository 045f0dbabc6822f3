// The merge of two groups of waves that attended with the same query rows to different keys.
#pragma once

#include "cdna/common/lds.hpp"
#include "cdna/decode/accum_o.hpp"
#include "cdna/decode/softmax.hpp"

namespace cdna {

// LDS of the merge: as many output tiles of each wave as there is room for, then row statistics [wave][2 tiles][max,
// sum][16 rows].
template <class Policy, class Output>
struct KeyGroupExchange {
  static constexpr int tile_bytes = WAVE * 16;
  static constexpr int row_bytes = 16 * 4;
  static constexpr int statistics_bytes = Policy::waves * 4 * row_bytes;
  static constexpr bool at_once = Policy::waves * Output::tiles * tile_bytes + statistics_bytes <= Policy::lds_bytes;
  static constexpr int part_tiles = at_once ? Output::tiles : 8;
  static constexpr int part_bytes = part_tiles * tile_bytes;
  static constexpr int statistics = Policy::waves * part_bytes;
  static constexpr int lds_bytes = statistics + statistics_bytes;
};

// Each wave and the wave `distance` apart hold `tiles` tiles of the same rows. Afterwards the wave of group 0 holds the
// merged tile 0 and that of group 1 the merged tile 1, each with its `max` and `sum`. All waves of the workgroup call
// this, and they need another barrier before any of them writes there again.
template <class Policy, int tiles, class Row, class Output>
MLA_DEVICE void merge_key_groups(LdsBytes lds, int wave, int group, int distance, const Lane& lane,
                                 Row (&softmax)[tiles], Output (&output)[tiles]) {
  using Lds = KeyGroupExchange<Policy, Output>;
  constexpr int tile_bytes = Lds::tile_bytes, row_bytes = Lds::row_bytes, part_tiles = Lds::part_tiles;
  const LdsBytes mine = lds + Lds::statistics + wave * 4 * row_bytes + lane.column * 4;
  const LdsBytes other = lds + Lds::statistics + (wave ^ distance) * 4 * row_bytes + lane.column * 4;
  const LdsBytes sent = lds + wave * Lds::part_bytes + lane.index * 16;
  const LdsBytes received = lds + (wave ^ distance) * Lds::part_bytes + lane.index * 16;
  float scale[tiles], other_scale[tiles];
  const auto merge_statistics = [&](int r) {
    const float other_max = lds_read_float(other + 2 * r * row_bytes);
    const float max = __builtin_fmaxf(softmax[r].max, other_max);
    scale[r] = Policy::exp2(softmax[r].max - max);
    other_scale[r] = Policy::exp2(other_max - max);
    softmax[r].max = max;
    softmax[r].sum = softmax[r].sum * scale[r] + lds_read_float(other + (2 * r + 1) * row_bytes) * other_scale[r];
  };
  mla::block_sync();
  if (lane.group == 0) {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      lds_write_float(mine + 2 * r * row_bytes, softmax[r].max);
      lds_write_float(mine + (2 * r + 1) * row_bytes, softmax[r].sum);
    }
  }
#pragma unroll
  for (int first = 0; first < Output::tiles; first += part_tiles) {
    if (first > 0) mla::block_sync();
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (group == r) continue;
#pragma unroll
      for (int t = 0; t < part_tiles; ++t) {
        pin_to_agpr(output[r].tile[first + t]);
        lds_write_f32x4(sent + t * tile_bytes, output[r].tile[first + t]);
        if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);
      }
    }
    mla::block_sync();
    // Several parts need the factors outside the branches.
#pragma unroll
    for (int r = 0; r < tiles; ++r)
      if (!Lds::at_once && first == 0) merge_statistics(r);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (group != r) continue;
      if (Lds::at_once) merge_statistics(r);
#pragma unroll
      for (int t = 0; t < part_tiles; ++t) {
        f32x4& x = output[r].tile[first + t];
        pin_to_agpr(x);
        x = x * scale[r] + lds_read_f32x4(received + t * tile_bytes) * other_scale[r];
        pin_to_agpr(x);
        if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);
      }
    }
  }
}

}  // namespace cdna
