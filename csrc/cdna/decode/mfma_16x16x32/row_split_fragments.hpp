// The operands of the row-split mainloop for 16x16x32 matrix instructions: how a wave reads them from a
// stage of keys in LDS, and multiplies its row tiles by them.
#pragma once

#include "cdna/common/lds.hpp"
#include "cdna/common/swizzled_lds_tile.hpp"
#include "cdna/decode/accum_o.hpp"
#include "cdna/decode/mfma_16x16x32/products.hpp"

namespace cdna::mfma_16x16x32 {

template <class Problem, class Mma, class Partition, int tiles>
class RowSplitFragments {
  using Tile = SwizzledLdsTile<Problem::Format::bytes, Problem::row_bytes, Mma::shared_keys>;
  static constexpr int array = tiles > 0 ? tiles : 1;
  static constexpr int keys_of_wave = Tile::keys / Partition::key_groups;

 public:
  using Qk = typename Mma::Qk;
  using Pv = typename Mma::SharedPv;
  using Query = typename Qk::Query;
  using Output = AccumO<Problem::latent>;
  static constexpr int score_tiles = keys_of_wave / 16;
  static constexpr int products = score_tiles * 16 / Pv::keys;
  static constexpr int in_vgpr = 4;  // of the second row tile's accumulators, which make room for those of scores
  using Scores = f32x4[score_tiles];
  using P = typename Pv::Rows[products];

 private:
  // A step of QK^T is one 128-byte block of 32 keys' rows, or their tails; keys are read a step ahead of the products.
  static constexpr int steps_of_rows = Tile::blocks + (Tile::has_tail ? 1 : 0);
  static constexpr int steps = steps_of_rows * (score_tiles / 2);
  MLA_DEVICE static constexpr bool is_tail(int step) { return Tile::has_tail && step % steps_of_rows == Tile::blocks; }
  MLA_DEVICE static constexpr int reads_of(int step) { return is_tail(step) ? 2 : 4; }

  static constexpr int reads = products * Pv::reads;  // per column tile
  static constexpr int column_group = 8 / reads;      // column tiles that are read at once
  static constexpr int column_groups = Output::tiles / column_group;
  static constexpr int pair = tiles == 1 && column_group > 1 ? 2 : 1;

 public:
  // An early barrier makes 96 and 128 rows of an fp8 cache spill; kept targets spare a work tile 1,300 modelled clocks.
  static constexpr bool enters_early = false;
  static constexpr bool rescales_tiles_alone = false;
  static constexpr bool keeps_targets = true;

  // Keys that are read ahead, and the first values.
  struct Keys {};
  struct Values {
    u32x2 group[column_group][reads];
  };

  MLA_DEVICE RowSplitFragments(LdsBytes lds, const Lane& lane)
      : lds_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds))), key_map_(lane), column_map_(lane) {}
  // Moves to the first key of the wave's group.
  MLA_DEVICE void skip(int keys) {
    key_map_.first += keys / 8 * Tile::group_bytes;
    key_map_.tail += keys * 64;
    column_map_.first += keys / 8 * Tile::group_bytes;
  }

  MLA_DEVICE void enter(uint32_t, Keys&) const {}  // `scores` reads the first keys

  // S^T = K Q^T, beside the parts of `copy`.
  template <class Copy>
  MLA_DEVICE void scores(uint32_t stage, Keys&, const Query (&query)[array], Scores (&s)[array],
                         const Copy& copy) const {
    u32x4 keys[2][2][2];  // [step][key tile][piece]
    read_keys(lds_ + stage, 0, keys[0]);
    copy.begin();
    multiply_steps<0>(lds_ + stage, keys, query, s, copy);
  }

  // Begins to read the stage's first values.
  MLA_DEVICE void begin_values(uint32_t stage, Values& values) const { read_values(lds_ + stage, 0, values.group); }

  // O^T += V^T P^T. `values` holds, or will, the first group of columns; each group is read while the one before is
  // multiplied. Calls `leave` when the stage was read.
  template <class Leave>
  MLA_DEVICE void multiply_values(uint32_t stage, Values& first, const P (&p)[array], Output (&output)[array],
                                  const Leave& leave) const {
    u32x2(&values)[column_group][reads] = first.group;
    u32x2 next[column_group][reads];
#pragma unroll
    for (int g = 0; g < column_groups; ++g) {
      u32x2(&now)[column_group][reads] = g % 2 ? next : values;
      if (g + 1 < column_groups) {
        read_values(lds_ + stage, g + 1, g % 2 ? values : next);
        wait_lgkmcnt<column_group * reads>();
      } else {
        wait_lgkmcnt<0>();
      }
      // Column tiles or row tiles alternate, so that no product follows one into the same accumulator.
#pragma unroll
      for (int c = 0; c < column_group; c += pair) {
        typename Pv::Columns columns[pair][products];
        columns_of<Pv>(now, c, columns);
#pragma unroll
        for (int i = 0; i < pair * products; ++i) {
#pragma unroll
          for (int r = 0; r < tiles; ++r) {
            const int column = g * column_group + c + i % pair;
            f32x4& sum = output[r].tile[column];
            sum = Pv::multiply(columns[i % pair][i / pair], p[r][i / pair], sum);
            if (r == 1 && column >= Output::tiles - in_vgpr) pin_to_vgpr(sum);
          }
        }
      }
    }
    leave();
  }

  // Output columns that a lane holds beside each other: element n of run i, and the column of its first.
  static constexpr int run = 4;
  MLA_DEVICE static float element(const Output& output, int i, int n) { return output.tile[i][n]; }
  MLA_DEVICE static int first_column(int i, const Lane& lane) { return 16 * i + 4 * lane.group; }
  MLA_DEVICE static void take_run(Output&, int) {}

 private:
  template <int step, class Copy>
  MLA_DEVICE void multiply_steps(uint32_t stage, u32x4 (&keys)[2][2][2], const Query (&query)[array],
                                 Scores (&s)[array], const Copy& copy) const {
    if constexpr (step < steps) {
      if constexpr (step + 1 < steps) {
        read_keys(stage, step + 1, keys[(step + 1) % 2]);
        wait_lgkmcnt<reads_of(step + 1)>();
      } else {
        wait_lgkmcnt<0>();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32x4(&now)[2] = keys[step % 2][half];
        constexpr int n = step % steps_of_rows;
        const int T = step / steps_of_rows * 2 + half;
        if constexpr (is_tail(step)) {
          const auto left =
              Qk::tail(now[0], now[1]);  // now[1] still holds a piece of these keys, from two steps before
#pragma unroll
          for (int r = 0; r < tiles; ++r) s[r][T] = Qk::multiply_tail(left, query[r], s[r][T]);
        } else {
          const auto left = Qk::keys(now[0], now[1]);
#pragma unroll
          for (int r = 0; r < tiles; ++r) s[r][T] = Qk::multiply(left, query[r], n, s[r][T]);
        }
        const int place = 2 * step + half;
#pragma unroll
        for (int n = place * Copy::parts / (2 * steps); n < (place + 1) * Copy::parts / (2 * steps); ++n) copy.part(n);
      }
      multiply_steps<step + 1>(stage, keys, query, s, copy);
    }
  }

  MLA_DEVICE void read_keys(uint32_t stage, int step, u32x4 (&keys)[2][2]) const {
    const int n = step % steps_of_rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int T = step / steps_of_rows * 2 + half;
#pragma unroll
      for (int part = 0; part < reads_of(step) / 2; ++part)
        keys[half][part] = lds_read16(key_map_.of(stage, T, 2 * n + part));
    }
  }
  MLA_DEVICE void read_values(uint32_t stage, int g, u32x2 (&values)[column_group][reads]) const {
#pragma unroll
    for (int c = 0; c < column_group; ++c)
#pragma unroll
      for (int n = 0; n < reads; ++n) values[c][n] = column_map_.read(stage, g * column_group + c, n);
  }

  uint32_t lds_;
  KeyReadMap<Tile> key_map_;
  ColumnReadMap<Tile> column_map_;
};

}  // namespace cdna::mfma_16x16x32
