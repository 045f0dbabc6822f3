// PV of sparse decode by transposed LDS reads: one wave's columns of the output, to which P and values are added.
#pragma once

#include "cdna/common/accum_registers.hpp"
#include "cdna/common/lds.hpp"
#include "cdna/common/mfma_16x16x32.hpp"
#include "common/problem.hpp"

namespace cdna::sparse::mfma_16x16x32 {

template <class KvFormat, class Partition, class Tile>
class PvMma {
  static constexpr int row_tiles = Partition::row_tiles;
  static constexpr int key_steps = Partition::keys / 32;

 public:
  using Mma = Mfma16x16x32<mla::bf16>;  // of QK^T, too
  static constexpr int column_tiles = mla::VALUE_DIM / 16 / Partition::waves;
  // Tile [r][i] of a lane is columns 128 w + 16 i + 4 * lane.group + 0..3 of row 16 r + lane.column.
  using Output = f32x4[row_tiles][column_tiles];

  // Return the lane's first key as the left operand of PV, and its offset in a tile at the lane's first column. They
  // are two, because LLVM 22 computes both otherwise when nothing lies between.
  MLA_DEVICE static int first_key(const Lane& lane) { return 4 * lane.group + lane.column / 4; }
  MLA_DEVICE static uint32_t first_column(int key, const Lane& lane, int wave) {
    return static_cast<uint32_t>(Tile::slot_offset(key, lane.column % 4 / 2) + lane.column % 2 * 8) + wave * 2048;
  }

  MLA_DEVICE static void clear(Output& output) {
#if __clang_major__ < 22
    // A constant zero would be kept in registers from one work tile to the next; LLVM 22 needs no hint.
    const float zero = mla::bit_cast<float>(rematerialized(0));
#else
    const float zero = 0.0f;
#endif
#pragma unroll
    for (int r = 0; r < row_tiles; ++r)
#pragma unroll
      for (int i = 0; i < column_tiles; ++i) output[r][i] = f32x4{zero, zero, zero, zero};
  }

  // O^T += V^T P^T. `p` is the LDS address of the lane's P, `first_column` the offset of its values within a tile. The
  // latter comes by reference because LLVM 22 orders the reads of one kernel otherwise when it comes by value.
  MLA_DEVICE static void multiply(Output& output, uint32_t p, uint32_t tile, const uint32_t& first_column) {
#pragma unroll
    for (int part = 0; part < parts; ++part) multiply_part(output, part, p, tile, first_column);
  }

  MLA_DEVICE static void rescale(Output& output, int r, float alpha) {
#pragma unroll
    for (int i = 0; i < column_tiles; ++i) {
      f32x4& x = output[r][i];
      if (!in_vgpr(r, i)) pin_to_agpr(x);
      x *= alpha;
      if (!in_vgpr(r, i)) pin_to_agpr(x);
      if (i % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or all pass through VGPRs at once
    }
  }

  // Stores the output of 16 rows; `tile(i)` is the lane's element i of an Output row.
  template <class Target, class Tiles>
  MLA_DEVICE static void store(const Target& target, int first_column, const Lane& lane, const Tiles& tile) {
    target.template store<column_tiles, 16>(first_column + 4 * lane.group, tile);
  }

 private:
  static constexpr int pairs = key_steps * column_tiles;  // of a 32-key step and 16 columns each
  static constexpr int group = row_tiles < 6 ? 4 : KvFormat::raw_registers > 32 ? 1 : 2;  // pairs read at once
  static constexpr int groups = pairs / group;
  // P of all rows is held at once, except where raw keys take many registers: then of half of 128 rows, and values are
  // read twice.
  static constexpr int parts = row_tiles == 8 && KvFormat::raw_registers > 32 ? 2 : 1;
  static constexpr int part_tiles = row_tiles / parts;

  MLA_DEVICE static void multiply_part(Output& output, int part, uint32_t p, uint32_t tile,
                                       const uint32_t& first_column) {
    u32x4 probabilities[part_tiles][key_steps];
#pragma unroll
    for (int r = 0; r < part_tiles; ++r)
#pragma unroll
      for (int k = 0; k < key_steps; ++k)
        probabilities[r][k] = lds_read16(lds_pointer(p + ((part * part_tiles + r) * key_steps + k) * 1024));
    u32x4 values[2][group];
    read_values(tile, first_column, 0, values[0]);
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      if (g + 1 < groups) {
        read_values(tile, first_column, g + 1, values[(g + 1) % 2]);
        wait_lgkmcnt<2 * group>();
      } else {
        wait_lgkmcnt<0>();
      }
#pragma unroll
      for (int i = 0; i < group; ++i) {
        const int pair = g * group + i, column = pair % column_tiles;
#pragma unroll
        for (int r = 0; r < part_tiles; ++r) {
          f32x4& sum = output[part * part_tiles + r][column];
          if (in_vgpr(part * part_tiles + r, column)) pin_to_vgpr(sum);
          sum = Mma::multiply(values[g % 2][i], probabilities[r][pair / column_tiles], sum);
        }
      }
    }
  }
  // Transposed reads bring column 16 i + lane.column of the wave's, keys 32 k + 4 * lane.group + 0..3 and the same plus
  // 16.
  MLA_DEVICE static void read_values(uint32_t tile, const uint32_t& first_column, int g, u32x4 (&values)[group]) {
#pragma unroll
    for (int i = 0; i < group; ++i) {
      const int pair = g * group + i, column = pair % column_tiles, k = pair / column_tiles;
      const uint32_t at = ((tile + first_column) ^ (column % 4 * 32)) + column / 4 * 1024 + k * 4 * Tile::group_bytes;
      const u32x2 low = read_columns(at), high = read_columns(at + 2 * Tile::group_bytes);
      values[i] = u32x4{low[0], low[1], high[0], high[1]};
    }
  }
  MLA_DEVICE static u32x2 read_columns(uint32_t at) {
    return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((MLA_LDS s16x4*)lds_pointer(at)));
  }

  // Says which output is kept in VGPRs: 128 rows would leave no AGPR for scores.
  MLA_DEVICE static constexpr bool in_vgpr(int r, int i) { return row_tiles == 8 && r == 7 && i >= column_tiles - 2; }
};

}  // namespace cdna::sparse::mfma_16x16x32
