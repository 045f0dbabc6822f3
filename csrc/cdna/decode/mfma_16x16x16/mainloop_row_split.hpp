// The mainloop for 32 to 128 rows: the waves share stages of keys in LDS and split the query rows, one or two 16-row
// tiles to a wave. No softmax state crosses a wave; one barrier per stage publishes a landed one and frees the one
// before it.
//
// Where values change their type on the way, up to 64 rows are split in two ways: two waves over rows, two over the
// keys of a stage. Each conversion and each LDS read then serves two row tiles; the results are merged when the work
// tile ends.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/score_scale.hpp"
#include "cdna/decode/mfma_16x16x16/kv_stage_tile.hpp"
#include "cdna/decode/mfma_16x16x16/merge_key_groups.hpp"
#include "cdna/decode/mfma_16x16x16/products.hpp"
#include "cdna/decode/row_mask.hpp"
#include "cdna/decode/softmax.hpp"
#include "cdna/decode/tile_copy.hpp"
#include "common/paged_kv.hpp"

namespace cdna::mfma_16x16x16 {

// How the waves share the row tiles: as many waves as needed get `max_tiles`, so that as few waves read the keys as the
// busiest one allows (three of four with 5 or 6 tiles: the fourth would save the others nothing).
template <class Problem, class Policy, class Mma>
struct RowPartition {
  static constexpr int key_groups = Mma::splits_keys && Problem::row_tiles <= Policy::waves ? 2 : 1;
  static constexpr int waves = Policy::waves / key_groups;  // of a key group
  static constexpr int max_tiles = (Problem::row_tiles + waves - 1) / waves;
  static constexpr int busy = (Problem::row_tiles + max_tiles - 1) / max_tiles;  // waves with tiles: w, w + busy
  // Waves with `max_tiles`; the other busy ones have one less.
  static constexpr int full = Problem::row_tiles - (max_tiles - 1) * busy;
  static_assert(key_groups == 1 || busy == waves, "row split: all waves take part in merging key groups");
};

template <class Problem, class Policy, class Mma, int tiles>
class RowSplitWave;

template <class Problem, class Policy, class Mma>
struct RowSplitMainloop {
  using Partition = RowPartition<Problem, Policy, Mma>;
  static constexpr int lds_bytes = Partition::key_groups > 1 ? KeyGroupExchange<Policy>::lds_bytes : 0;
  static constexpr bool sync_after_tile = true;
  static constexpr bool scalar_partial_row = false;

  template <class Kernel>
  MLA_DEVICE static void run_waves(LdsBytes lds) {
    const int wave = wave_id();
    const int in_group = wave % Partition::waves;
    if (in_group < Partition::full) {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, Mma, Partition::max_tiles>>(lds, wave);
    } else if (in_group < Partition::busy) {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, Mma, Partition::max_tiles - 1>>(lds, wave);
    } else {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, Mma, 0>>(lds, wave);
    }
  }
};

// One wave's part: `tiles` 16-row tiles against every key of a work tile. A wave without rows still copies its keys.
template <class Problem, class Policy, class Mma, int tiles>
class RowSplitWave {
  using Qk = typename Mma::Qk;
  using Pv = typename Mma::Pv;
  using Query = typename Qk::Query;
  using Output = AccumO<Problem::latent>;
  using Partition = RowPartition<Problem, Policy, Mma>;
  using Stage = KvStageTile<Problem, Mma::shared_keys>;
  static constexpr int pieces = Problem::row_bytes / 64;
  static constexpr int key_groups = Partition::key_groups;
  static constexpr int tile_keys = Stage::keys / key_groups;  // of a stage, that the wave multiplies
  static constexpr int score_tiles = tile_keys / 16;
  using Softmax = TileSoftmax<Policy, Pv, score_tiles>;
  static constexpr int products = Softmax::products;
  static constexpr int array = tiles > 0 ? tiles : 1;
  static constexpr int in_vgpr = 2;  // of the second tile's accumulators, which make room for two of scores

 public:
  MLA_DEVICE RowSplitWave(const mla::DecodeParams& p, const mla::WorkTile& tile, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds, int wave)
      : tile_(tile),
        rows_(rows),
        lane_(Lane::current()),
        wave_(of_this_tile(wave)),
        lds_(lds),
        key_group_(wave_ / Partition::waves),
        read_map_(lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
    if constexpr (key_groups > 1) read_map_.skip(key_group_ * score_tiles);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      first_row_[r] = first_row + 16 * (wave_ % Partition::waves + r * Partition::busy);
      softmax_[r].clear();
    }
  }

  // QK^T, softmax and PV over the keys of the work tile.
  template <class Producer>
  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    const int count = (tile_.end_key - tile_.first_key + Stage::keys - 1) / Stage::keys;
    if (count <= 0) {
      clear_output();
      return;
    }
    const mla::PagedKv paged_kv(p, Problem::Format::bytes, tile_.sequence);
    Producer producer(paged_kv, tile_, p.rope_cos_sin, count, lds_, lane_, wave_);
    if (tiles > 0) whole_ = WholeTiles::of<tile_keys>(p, rows_, tile_, first_row_[0]);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      const Lane lane = lane_.rematerialized();
      query_[r] = Query::load(p, rows_, first_row_[r], lane);
      mask_[r] = RowMask::of(p, rows_, tile_, whole_.first, first_row_[r], lane);
    }
    clear_output();
    wait_all_loads();

    int filled = 0, used = 0;  // stages that the next tile is copied to and read from
    for (int n = 0; n < min(Producer::prefetch, count); ++n) {
      producer.copy(n, filled);
      filled = Producer::next_stage(filled);
    }
    int position = tile_.first_key + key_group_ * tile_keys - whole_.first;
    KeyReads keys;
    int n = 0;
    // Begins to read tile n.
    const auto enter = [&] {
      mla::block_sync();
      if (tiles > 0 && early_keys) {
#pragma unroll
        for (int g = 0; g < keys_ahead; ++g) read_keys(lds_ + used, g, keys.group[g]);
      }
    };
    producer.wait(0, used);
    enter();
    for (; n + Producer::prefetch < count; ++n) {
      accumulate(lds_ + used, keys, position, TileCopy<Producer>{producer, n + Producer::prefetch, filled}, [&] {
        used = Producer::next_stage(used);
        producer.wait_in_flight(used);
        enter();
      });
      filled = Producer::next_stage(filled);
      position += Stage::keys;
      end_turn();
    }
    for (; n < count; ++n) {
      accumulate(lds_ + used, keys, position, NoCopy(), [&] {
        if (n + 1 == count) return;
        used = Producer::next_stage(used);
        producer.wait(n + 1, used);
        enter();
      });
      position += Stage::keys;
    }
  }

  // Makes each row's sums one, and one of the key groups' results.
  MLA_DEVICE void finish() {
    const Lane lane = lane_.rematerialized();
#pragma unroll
    for (int r = 0; r < tiles; ++r) softmax_[r].join(lane);
    if constexpr (key_groups > 1 && tiles > 0) {
      merge_key_groups<Policy, tiles>(lds_, wave_, key_group_, Partition::waves, lane, softmax_, output_);
    }
  }

  template <class Epilogue>
  MLA_DEVICE void store(const mla::DecodeParams& p) {
    const float value_scale = Epilogue::value_scale(p);
    float scale[array], lse[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      const Epilogue target(p, tile_, rows_, first_row_[r] + lane_.rematerialized().column);
      const float sum = softmax_[r].sum;
      const mla::RowResult<Policy> result = target.finish(softmax_[r].max, sum);
      lse[r] = opaque(result.lse);
      scale[r] = roundable(Softmax::output_scale(result.scale, sum, softmax_[r].divisor()) * value_scale);
    }
    // A load from here on would wait for the stores before it.
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_groups > 1 && key_group_ != r) continue;
      const Lane lane = lane_.rematerialized();
      const Epilogue target(p, tile_, rows_, first_row_[r] + lane.column);
      if (lane.group == 0) target.store_lse(lse[r]);
      target.template store<BLOCK_TILES, Output::blocks * 4>([&](int i, mla::Vec<float, BLOCK_TILES>& values) {
        const int b = i / 4, e = i % 4;
        __builtin_amdgcn_sched_barrier(0);  // or all pieces are scaled before the first is stored
        if (e == 0) {
#pragma unroll
          for (int t = 0; t < BLOCK_TILES; ++t) pin_to_agpr(output_[r].tile[b][t]);
        }
#pragma unroll
        for (int t = 0; t < BLOCK_TILES; ++t) values[t] = output_[r].tile[b][t][e] * scale[r];
        return b * BLOCK_COLUMNS + lane.group * 32 + e * 8;
      });
    }
  }

 private:
  MLA_DEVICE void clear_output() {
#pragma unroll
    for (int r = 0; r < tiles; ++r) output_[r].clear();
  }

  // A group of pieces of keys is read while the one or two before it are multiplied, and the first of a tile, where
  // registers last for it, beside the last products of the tile before.
  static constexpr int group = pieces % 3 == 0 ? 3 : pieces % 4 == 0 ? 4 : 5;
  static_assert(pieces % group == 0, "row split: whole groups of pieces");
  static constexpr bool early_keys = Partition::max_tiles * sizeof(Query) <= 288;
  using Keys = typename Qk::Keys;
  static constexpr bool converts = Keys::steps > 0;
  // How many groups are read ahead: LDS serves four waves, and the last of them waits for it.
  static constexpr int keys_ahead = Partition::max_tiles == 1 && !converts && !Problem::rotate ? 2 : 1;
  static constexpr int held = keys_ahead + 1;
  struct KeyReads {
    u32x4 group[held][RowSplitWave::group];
  };

  // QK^T, softmax and PV of the tile at `stage` in LDS whose first key has `position`, counted from whole_.first, and
  // whose first keys are read. Another tile is copied meanwhile. Calls `leave` when the stage was read.
  template <class Copy, class Leave>
  MLA_DEVICE void accumulate(LdsBytes stage, KeyReads& keys, int position, const Copy& copy, const Leave& leave) {
    if (tiles == 0) {
      copy.whole();
      leave();
      return;
    }
    f32x4 s[array][score_tiles];
    scores(stage, keys.group, s, copy);
    Values values[2][reads];
    read_values(stage, 0, values[0]);
    if (groups > 1) read_values(stage, 1, values[1]);
    if (__builtin_expect(!whole_.begins_one(position), false)) {
      const int of_lane = position + 4 * lane_.rematerialized().group;
#pragma unroll
      for (int r = 0; r < tiles; ++r) mask_[r].template apply<score_tiles>(s[r], of_lane);
    }
    rescale(s);
    typename Softmax::P p[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) Softmax::compute_p(s[r], scale_, softmax_[r], p[r]);
    multiply_values(stage, values, p, leave);
  }

  // S^T = K Q^T.
  template <class Copy>
  MLA_DEVICE void scores(LdsBytes stage, u32x4 (&keys)[held][group], f32x4 (&s)[array][score_tiles],
                         const Copy& copy) {
    constexpr int groups = pieces / group * score_tiles;  // of reads
#pragma unroll
    for (int r = 0; r < tiles; ++r)
#pragma unroll
      for (int T = 0; T < score_tiles; ++T) s[r][T] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    // Products into one accumulator wait for each other: a lone row tile has two for each score tile.
    f32x4 odd[score_tiles];
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) odd[T] = s[0][T];
    if (!early_keys) read_keys(stage, 0, keys[0]);
    Keys left[2];
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
          sum = Qk::multiply(left[place % 2], query_[r], n, i / array, sum);
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

  // Makes operands of a piece of keys: those of its steps that fall to one of `places`.
  MLA_DEVICE static void convert(u32x4 piece, int place, int places, Keys& keys) {
    keys.piece = piece;
    if constexpr (converts) {
#pragma unroll
      for (int step = place * Keys::steps / places; step < (place + 1) * Keys::steps / places; ++step) keys.step(step);
    }
  }

  MLA_DEVICE void read_keys(LdsBytes stage, int g, u32x4 (&keys)[group]) const {
#pragma unroll
    for (int c = 0; c < group; ++c)
      keys[c] = lds_read16(stage + read_map_.of_piece(g * group / pieces, g * group % pieces + c));
  }

  // Raises the running max of rows that a score exceeds by more than the threshold of the lazy rescale.
  MLA_DEVICE void rescale(const f32x4 (&s)[array][score_tiles]) {
    bool exceeded[array];
    float largest[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      largest[r] = lane_max(s[r]);
      exceeded[r] = Softmax::exceeds(softmax_[r], largest[r] * scale_);
    }
    if (__builtin_expect(any_lane(exceeded[0] || exceeded[array - 1]), false)) {
#pragma unroll
      for (int r = 0; r < tiles; ++r) {
        if (tiles > 1 && !any_lane(exceeded[r])) continue;
        const float alpha = Softmax::raise_max(softmax_[r], largest[r], scale_, lane_.rematerialized());
        if (r == 1) {
          output_[r].template scale<in_vgpr>(alpha);
        } else {
          output_[r].scale(alpha);
        }
      }
    }
  }

  using Values = typename Pv::Values;
  using Unit = typename Pv::Unit;
  static constexpr int units = BLOCK_TILES / Unit::columns;
  static constexpr int reads = Pv::keys / 4;
  static constexpr int groups = Output::blocks * products;  // of reads: a block of columns of the keys of a product

  MLA_DEVICE void read_values(LdsBytes stage, int g, Values (&values)[reads]) const {
#pragma unroll
    for (int n = 0; n < reads; ++n) {
      const int key = g % products * reads + n;
      values[n] = *reinterpret_cast<MLA_LDS Values*>(stage + read_map_.of_columns(key / 4, g / products, key % 4));
    }
  }

  // O^T += V^T P^T. `values` holds, or will, the first two groups; each later one is read while the one before is
  // multiplied. Between the products of a unit of columns stand the instructions that transpose the next: a matrix
  // instruction leaves a wave 12 clocks in which it may issue others, and left to itself the compiler puts them ahead.
  template <class Leave>
  MLA_DEVICE void multiply_values(LdsBytes stage, Values (&values)[2][reads], const typename Softmax::P (&p)[array],
                                  const Leave& leave) {
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
        const int column = u * Unit::columns + c, b = g / products;
        f32x4& sum = output_[r].tile[b][column];
        sum = Pv::multiply(unit[n % 2].column[c], p[r][g % products], sum);
        if (r == 1 && b * BLOCK_TILES + column >= Output::blocks * BLOCK_TILES - in_vgpr) pin_to_vgpr(sum);
        if (n + 1 < groups * units) {
#pragma unroll
          for (int step = place * Unit::steps / places; step < (place + 1) * Unit::steps / places; ++step)
            unit[(n + 1) % 2].step(values[(n + 1) / units % 2], (n + 1) % units, step);
        }
        __builtin_amdgcn_sched_barrier(0);
      }
    }
  }

  // Returns the wave as a new value: with key groups or rotated keys LLVM 22 would keep what follows from it for the next
  // work tiles, in more scalar registers than there are.
  MLA_DEVICE static int of_this_tile(int wave) {
    if constexpr (key_groups > 1 || Problem::rotate) asm volatile("" : "+s"(wave));
    return wave;
  }

  // This is a member because LLVM 22 compiles 32, 48, 80 and 96 rows otherwise with a function of the namespace.
  MLA_DEVICE static int min(int a, int b) { return a < b ? a : b; }

  const mla::WorkTile tile_;
  const mla::SequenceRows rows_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;
  const int key_group_;
  KvStageReadMap<Stage> read_map_;
  const float scale_;
  WholeTiles whole_ = {};
  int first_row_[array];
  RowMask mask_[array];
  typename Softmax::Row softmax_[array];
  Query query_[array];
  Output output_[array];
};

}  // namespace cdna::mfma_16x16x16
