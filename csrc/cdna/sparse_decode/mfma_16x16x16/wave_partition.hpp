// How the four waves of a sparse decode workgroup share the scores of a tile, with 64 KiB of LDS.
#pragma once

#include "common/device.hpp"

namespace cdna::sparse::mfma_16x16x16 {

// One tile of 32 keys is all that fits beside P, so the waves score what all of them brought, as a grid of `row_groups`
// x `key_groups`. With 16 rows there is work for two of them.
template <int row_tiles_>
struct WavePartition {
  static constexpr int waves = 4;
  static constexpr int row_tiles = row_tiles_;
  static constexpr int row_groups = row_tiles == 1 ? 1 : 2;
  static constexpr int key_groups = 2;
  static constexpr int scoring_waves = row_groups * key_groups;
  static constexpr int wave_row_tiles = row_tiles / row_groups;
  static constexpr int keys = 32;
  static constexpr int wave_key_tiles = keys / 16 / key_groups;
  static constexpr bool scores_own_keys = false;
  static constexpr int stages = 1;
  MLA_DEVICE static int row_group_of(int wave) { return wave / key_groups % row_groups; }
  static_assert(row_tiles % row_groups == 0, "sparse decode: as many row tiles for every row group");
  static_assert(row_tiles <= 4, "sparse decode: the queries of more rows do not fit beside the output");
};

}  // namespace cdna::sparse::mfma_16x16x16
