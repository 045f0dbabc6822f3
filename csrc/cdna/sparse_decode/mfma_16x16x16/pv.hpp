// PV of sparse decode without transposed LDS reads: one wave's columns of the output, to which P and values are added.
//
// A lane reads 16 bytes of each of four keys, eight neighbouring columns, and transposes them in registers. So the
// eight accumulators of a row tile hold eight neighbouring columns, as in dense decode.
#pragma once

#include "cdna/common/accum_registers.hpp"
#include "cdna/common/lds.hpp"
#include "cdna/common/mfma_16x16x16.hpp"
#include "cdna/common/transpose.hpp"
#include "common/problem.hpp"

namespace cdna::sparse::mfma_16x16x16 {

template <class, class Partition, class Tile>
class PvMma {
  static constexpr int row_tiles = Partition::row_tiles;
  static constexpr int key_steps = Partition::keys / 32;

 public:
  // QK^T contracts the eight values per lane of a 16-byte read.
  struct Mma {
    MLA_DEVICE static f32x4 multiply(u32x4 left, u32x4 right, f32x4 accumulator) {
      return multiply_chunk<mla::bf16>(left, right, accumulator);
    }
  };

  static constexpr int column_tiles = mla::VALUE_DIM / 16 / Partition::waves;
  // Tile [r][t]: element e of a lane is column 128 w + 8 * (4 * lane.group + e) + t of row 16 r + lane.column.
  using Output = f32x4[row_tiles][column_tiles];

  // Return the lane's first key as the left operand of PV, and the offset in a tile of its eight columns of that key.
  MLA_DEVICE static int first_key(const Lane& lane) { return 4 * lane.group; }
  MLA_DEVICE static uint32_t first_column(int key, const Lane& lane, int wave) {
    return static_cast<uint32_t>(Tile::slot_offset(key, 16 * wave + lane.column));
  }

  MLA_DEVICE static void clear(Output& output) {
    // A constant zero would be kept in registers from one work tile to the next.
    const float zero = mla::bit_cast<float>(rematerialized(0));
#pragma unroll
    for (int r = 0; r < row_tiles; ++r)
#pragma unroll
      for (int t = 0; t < column_tiles; ++t) output[r][t] = f32x4{zero, zero, zero, zero};
  }

  // O^T += V^T P^T. `p` is the LDS address of the lane's P, `first_column` the offset of its values within a tile. Each
  // 16 keys are read while those before are multiplied.
  MLA_DEVICE static void multiply(Output& output, uint32_t p, uint32_t tile, uint32_t first_column) {
    u32x4 probabilities[row_tiles][key_steps];
#pragma unroll
    for (int r = 0; r < row_tiles; ++r)
#pragma unroll
      for (int k = 0; k < key_steps; ++k) probabilities[r][k] = lds_read16(lds_pointer(p + (r * key_steps + k) * 1024));
    u32x4 values[2][4];
    read_values(tile + first_column, 0, values[0]);
#pragma unroll
    for (int n = 0; n < 2 * key_steps; ++n) {
      if (n + 1 < 2 * key_steps) {
        read_values(tile + first_column, n + 1, values[(n + 1) % 2]);
        wait_lgkmcnt<4>();
      } else {
        wait_lgkmcnt<0>();
      }
      const u32x4(&now)[4] = values[n % 2];
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const KeyColumns columns = transpose_pair(now[0][d], now[1][d], now[2][d], now[3][d]);
#pragma unroll
        for (int r = 0; r < row_tiles; ++r) {
          const u32x4 both = probabilities[r][n / 2];
          const u32x2 rows = n % 2 ? both.zw : both.xy;
          f32x4& first = output[r][2 * d];
          f32x4& second = output[r][2 * d + 1];
          first = Mfma16x16x16<mla::bf16>::multiply(columns.first, rows, first);
          second = Mfma16x16x16<mla::bf16>::multiply(columns.second, rows, second);
        }
      }
    }
  }

  MLA_DEVICE static void rescale(Output& output, int r, float alpha) {
#pragma unroll
    for (int t = 0; t < column_tiles; ++t) {
      f32x4& x = output[r][t];
      pin_to_agpr(x);
      x *= alpha;
      pin_to_agpr(x);
      if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or all pass through VGPRs at once
    }
  }

  // Stores the output of 16 rows; `tile(t)` is the lane's element t of an Output row.
  template <class Target, class Tiles>
  MLA_DEVICE static void store(const Target& target, int first_column, const Lane& lane, const Tiles& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      target.template store<4, 8>(first_column + 32 * lane.group + 4 * half, [&](int e) {
        const int t = 4 * half;
        return f32x4{tile(t)[e], tile(t + 1)[e], tile(t + 2)[e], tile(t + 3)[e]};
      });
    }
  }

 private:
  // Reads the lane's eight columns of keys 16 n + 4 * lane.group + 0..3. `at` is its address of key 4 * lane.group: of
  // the three keys behind it only the row within eight keys and the swizzle differ.
  MLA_DEVICE static void read_values(uint32_t at, int n, u32x4 (&values)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      values[j] = lds_read16(lds_pointer((at ^ (j * 128 | j * 32)) + n * 2 * Tile::group_bytes));
  }
};

}  // namespace cdna::sparse::mfma_16x16x16
