// How the four waves of a sparse decode workgroup share the scores of a tile, with 160 KiB of LDS.
#pragma once

#include "common/device.hpp"

namespace cdna::sparse::mfma_16x16x32 {

// The waves form a grid of `row_groups` x `key_groups`; rows are those of a workgroup, in tiles of 16. The fewer row
// groups, the fewer waves read each key; but the queries of more rows must then fit beside the output.
template <int row_tiles_, int row_groups_ = row_tiles_ <= 3   ? 1
                                            : row_tiles_ <= 6 ? 2
                                                              : 4>
struct WavePartition {
  static constexpr int waves = 4;
  static constexpr int row_tiles = row_tiles_;
  static constexpr int row_groups = row_groups_;
  static constexpr int key_groups = waves / row_groups;
  static constexpr int scoring_waves = waves;
  static constexpr int wave_row_tiles = row_tiles / row_groups;
  static constexpr int keys = key_groups == 4 ? 64 : 32;  // of a tile: 16 to a key group at least
  static constexpr int wave_key_tiles = keys / 16 / key_groups;
  static constexpr bool scores_own_keys = row_groups == 1;  // a wave scores the keys that it brought itself
  static constexpr int stages = scores_own_keys ? 2 : 3;
  MLA_DEVICE static int row_group_of(int wave) { return wave / key_groups; }
  static_assert(row_tiles % row_groups == 0, "sparse decode: as many row tiles for every row group");
};

}  // namespace cdna::sparse::mfma_16x16x32
