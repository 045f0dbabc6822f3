// The operands of the row-split mainloop for 16x16x16 matrix instructions: how a wave reads them from a
// stage of keys in LDS, and multiplies its row tiles by them.
#pragma once

#include "cdna/common/lds.hpp"
#include "cdna/decode/accum_o.hpp"
#include "cdna/decode/mfma_16x16x16/kv_stage_tile.hpp"
#include "cdna/decode/mfma_16x16x16/products.hpp"

namespace cdna::mfma_16x16x16 {

template <class Problem, class Mma, class Partition, int tiles>
class RowSplitFragments {
  using Stage = KvStageTile<Problem, Mma::shared_keys>;
  static constexpr int pieces = Problem::row_bytes / 64;
  static constexpr int array = tiles > 0 ? tiles : 1;

 public:
  using Qk = typename Mma::Qk;
  using Pv = typename Mma::Pv;
  using Query = typename Qk::Query;
  using Output = AccumO<Problem::latent>;
  static constexpr int score_tiles = Stage::keys / Partition::key_groups / 16;
  static constexpr int products = score_tiles * 16 / Pv::keys;
  static constexpr int in_vgpr = 2;  // of the second tile's accumulators, which make room for two of scores
  using Scores = f32x4[score_tiles];
  using P = typename Pv::Rows[products];

 private:
  // A group of pieces of keys is read while the one or two before it are multiplied, and the first of a tile, where
  // registers last for it, beside the last products of the tile before.
  static constexpr int group = pieces % 3 == 0 ? 3 : pieces % 4 == 0 ? 4 : 5;
  static_assert(pieces % group == 0, "row split: whole groups of pieces");
  static constexpr bool early_keys = Partition::max_tiles * sizeof(Query) <= 288;
  using KeyOperands = typename Qk::Keys;
  static constexpr bool converts = KeyOperands::steps > 0;
  // How many groups are read ahead: LDS serves four waves, and the last of them waits for it.
  static constexpr int keys_ahead = Partition::max_tiles == 1 && !converts && !Problem::rotate ? 2 : 1;
  static constexpr int held = keys_ahead + 1;

  using Columns = typename Pv::Values;
  using Unit = typename Pv::Unit;
  static constexpr int units = BLOCK_TILES / Unit::columns;
  static constexpr int reads = Pv::keys / 4;
  // Of reads: a block of columns of the keys of a product.
  static constexpr int groups = Output::tiles / BLOCK_TILES * products;

 public:
  // With kept targets LLVM 22 needs up to 5 % more instructions.
  static constexpr bool enters_early = true;
  static constexpr bool rescales_tiles_alone = true;
  static constexpr bool keeps_targets = false;

  // Keys that are read ahead, and the first values.
  struct Keys {
    u32x4 group[held][RowSplitFragments::group];
  };
  struct Values {
    Columns group[2][reads];
  };

  MLA_DEVICE RowSplitFragments(LdsBytes lds, const Lane& lane) : lds_(lds), read_map_(lane) {}
  // Moves to the first key of the wave's group.
  MLA_DEVICE void skip(int keys) {
    if constexpr (Partition::key_groups > 1) read_map_.skip(keys / 16);
  }

  // Begins to read the stage's first keys.
  MLA_DEVICE void enter(int offset, Keys& keys) const {
    const LdsBytes stage = lds_ + offset;
    if (tiles > 0 && early_keys) {
#pragma unroll
      for (int g = 0; g < keys_ahead; ++g) read_keys(stage, g, keys.group[g]);
    }
  }

  // S^T = K Q^T, beside the parts of `copy`.
  template <class Copy>
  MLA_DEVICE void scores(int offset, Keys& reads, const Query (&query)[array], Scores (&s)[array],
                         const Copy& copy) const {
    const LdsBytes stage = lds_ + offset;
    u32x4(&keys)[held][group] = reads.group;
    constexpr int groups = pieces / group * score_tiles;  // of reads
    // Products into one accumulator wait for each other: a lone row tile has two for each score tile.
    f32x4 odd[score_tiles];
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) odd[T] = s[0][T];
    if (!early_keys) read_keys(stage, 0, keys[0]);
    KeyOperands left[2];
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      if (g + keys_ahead < groups) read_keys(stage, g + keys_ahead, keys[(g + keys_ahead) % held]);
      if (g + 1 < groups) {
        if (keys_ahead > 1 && g + 2 < groups)
          wait_lgkmcnt<2 * group>();
        else if (g == 0 || !converts)
          wait_lgkmcnt<group>();
      } else if (!converts) {
        wait_lgkmcnt<0>();
      }
#pragma unroll
      for (int c = 0; c < group; ++c) {
        const int T = g * group / pieces, n = g * group % pieces + c;
        const int place = g * group + c;
        if (place == 0 || !converts) convert(keys[g % held][c], 0, 1, left[place % 2]);
        if (converts && c == group - 1) wait_lgkmcnt<0>();
#pragma unroll
        for (int i = 0; i < Qk::products * array; ++i) {
          const int r = i % array;
          f32x4& sum = array == 1 && i % 2 == 1 ? odd[T] : s[r][T];
          sum = Qk::multiply(left[place % 2], query[r], n, i / array, sum);
          if (converts && place + 1 < groups * group) {
            convert(keys[(place + 1) / group % held][(place + 1) % group], i, Qk::products * array,
                    left[(place + 1) % 2]);
            __builtin_amdgcn_sched_barrier(0);
          }
        }
        if (place == 0) copy.begin();
        constexpr int at_once = (Copy::parts + groups * group - 1) / (groups * group);
        if constexpr (at_once <= 1) {
          copy.part(place);
        } else {
#pragma unroll
          for (int n = 0; n < at_once; ++n) copy.part(place * at_once + n);
        }
      }
    }
    if (array == 1) {
#pragma unroll
      for (int T = 0; T < score_tiles; ++T) s[0][T] += odd[T];
    }
  }

  // Begins to read the stage's first values.
  MLA_DEVICE void begin_values(int offset, Values& values) const {
    const LdsBytes stage = lds_ + offset;
    read_values(stage, 0, values.group[0]);
    if (groups > 1) read_values(stage, 1, values.group[1]);
  }

  // O^T += V^T P^T. `values` holds, or will, the first two groups; each later one is read while the one before is
  // multiplied. Between the products of a unit of columns stand the instructions that transpose the next: a matrix
  // instruction leaves a wave 12 clocks in which it may issue others, and left to itself the compiler puts them ahead.
  // Calls `leave` when the stage was read.
  template <class Leave>
  MLA_DEVICE void multiply_values(int offset, Values& first, const P (&p)[array], Output (&output)[array],
                                  const Leave& leave) const {
    const LdsBytes stage = lds_ + offset;
    Columns(&values)[2][reads] = first.group;
    Unit unit[2];
    wait_lgkmcnt<(groups > 1 ? reads : 0)>();
#pragma unroll
    for (int step = 0; step < Unit::steps; ++step) unit[0].step(values[0], 0, step);
#pragma unroll
    for (int n = 0; n < groups * units; ++n) {
      const int g = n / units, u = n % units;
      if (u == units - 1 && g + 1 < groups) {
        if (g + 2 < groups) {
          read_values(stage, g + 2, values[g % 2]);
          wait_lgkmcnt<reads>();
        } else {
          wait_lgkmcnt<0>();
        }
      }
      if (n == (groups - 1) * units) leave();
      constexpr int places = Unit::columns * array;
#pragma unroll
      for (int place = 0; place < places; ++place) {
        const int c = place / array, r = place % array;
        const int t = g / products * BLOCK_TILES + u * Unit::columns + c;
        f32x4& sum = output[r].tile[t];
        sum = Pv::multiply(unit[n % 2].column[c], p[r][g % products], sum);
        if (r == 1 && t >= Output::tiles - in_vgpr) pin_to_vgpr(sum);
        if (n + 1 < groups * units) {
#pragma unroll
          for (int step = place * Unit::steps / places; step < (place + 1) * Unit::steps / places; ++step)
            unit[(n + 1) % 2].step(values[(n + 1) / units % 2], (n + 1) % units, step);
        }
        __builtin_amdgcn_sched_barrier(0);
      }
    }
  }

  // Output columns that a lane holds beside each other: element n of run i, and the column of its first.
  static constexpr int run = 8;
  MLA_DEVICE static float element(const Output& output, int i, int n) {
    return output.tile[i / 4 * BLOCK_TILES + n][i % 4];
  }
  MLA_DEVICE static int first_column(int i, const Lane& lane) {
    return i / 4 * BLOCK_COLUMNS + lane.group * 32 + i % 4 * 8;
  }
  // Called before the elements of a run are read.
  MLA_DEVICE static void take_run(Output& output, int i) {
    __builtin_amdgcn_sched_barrier(0);  // or all runs are scaled before the first is stored
    if (i % 4 > 0) return;
#pragma unroll
    for (int t = 0; t < BLOCK_TILES; ++t) pin_to_agpr(output.tile[i / 4 * BLOCK_TILES + t]);
  }

 private:
  // Makes operands of a piece of keys: those of its steps that fall to one of `places`.
  MLA_DEVICE static void convert(u32x4 piece, int place, int places, KeyOperands& keys) {
    keys.piece = piece;
    if constexpr (converts) {
#pragma unroll
      for (int step = place * KeyOperands::steps / places; step < (place + 1) * KeyOperands::steps / places; ++step)
        keys.step(step);
    }
  }

  MLA_DEVICE void read_keys(LdsBytes stage, int g, u32x4 (&keys)[group]) const {
#pragma unroll
    for (int c = 0; c < group; ++c)
      keys[c] = lds_read16(stage + read_map_.of_piece(g * group / pieces, g * group % pieces + c));
  }
  MLA_DEVICE void read_values(LdsBytes stage, int g, Columns (&values)[reads]) const {
#pragma unroll
    for (int n = 0; n < reads; ++n) {
      const int key = g % products * reads + n;
      values[n] = *reinterpret_cast<MLA_LDS Columns*>(stage + read_map_.of_columns(key / 4, g / products, key % 4));
    }
  }

  LdsBytes lds_;
  KvStageReadMap<Stage> read_map_;
};

}  // namespace cdna::mfma_16x16x16
