// Decode of 32 to 128 rows: the waves share 16-key tiles in LDS and split the query rows, a wave taking one or two
// 16-row tiles. Nothing of the softmax crosses a wave; one barrier per tile hands a landed stage over and frees the one
// before it.
//
// Up to 64 rows of an fp8 cache are split in two ways: two waves over rows, two over keys. A token is then half the
// bytes but as many LDS reads as ever, which would lead; with two row tiles per wave each read serves twice the
// products. Two tiles are consumed at once, while the next two are on their way as they are stored.
#pragma once

#include "cdna/decode/mfma_16x16x16/softmax.hpp"
#include "cdna/decode/mfma_16x16x16/producer_fp8_stage.hpp"
#include "cdna/common/kernel_params.hpp"
#include "cdna/decode/mfma_16x16x16/merge_key_groups.hpp"
#include "cdna/decode/query.hpp"
#include "cdna/decode/mfma_16x16x16/producer_kv_stage.hpp"
#include "cdna/common/tile_scheduler.hpp"
#include "common/epilogue.hpp"

namespace cdna {

// Keys are multiplied as they are stored, or converted on their way.
template <class Policy, class Problem, bool converted>
struct StagesOf {
  using Stages = KvStageProducer<Policy, Problem>;
};
template <class Policy, class Problem>
struct StagesOf<Policy, Problem, true> {
  using Stages = Fp8StageProducer<Policy, Problem>;
};

// How the waves share the row tiles: as many waves as needed get `most` tiles, so that the keys are read by as few
// waves as the busiest one allows (three of four with 5 or 6 tiles: the fourth would save the others nothing).
template <class Policy, class Problem>
struct RowShares {
  static constexpr int key_groups = Problem::Format::bytes == 1 && Problem::row_tiles <= Policy::waves ? 2 : 1;
  static constexpr int waves = Policy::waves / key_groups;  // of a key group
  static constexpr int most = (Problem::row_tiles + waves - 1) / waves;
  static constexpr int busy = (Problem::row_tiles + most - 1) / most;  // waves with tiles: w, w + busy
  static constexpr int full =
      Problem::row_tiles - (most - 1) * busy;  // waves with `most`; other busy ones have one less
  static_assert(key_groups == 1 || busy == waves, "row split: all waves take part in merging key groups");
};

template <class Policy, class Problem, int tiles>
class RowSplitWave;

template <class Policy, class Problem>
class RowSplitDecode {
  using Stages = typename StagesOf<Policy, Problem, Problem::Format::bytes == 1>::Stages;
  using Shares = RowShares<Policy, Problem>;

 public:
  static constexpr int threads = Policy::waves * WAVE;
  static constexpr int lds_bytes = Stages::bytes;

  MLA_DEVICE static void run(LdsBytes lds) {
    const int wave = wave_id();
    const int in_group = wave % Shares::waves;
    if (in_group < Shares::full) {
      run_wave<Shares::most>(lds, wave);
    } else if (in_group < Shares::busy) {
      run_wave<Shares::most - 1>(lds, wave);
    } else {
      run_wave<0>(lds, wave);
    }
  }

 private:
  template <int tiles>
  MLA_DEVICE static void run_wave(LdsBytes lds, int wave);
};

// One wave's part: `tiles` 16-row tiles against every key of an item. A wave without rows still copies its keys.
template <class Policy, class Problem, int tiles>
class RowSplitWave {
  using Element = typename Problem::Element;
  using Softmax = Weights<Policy, Element>;
  using Stages = typename StagesOf<Policy, Problem, Problem::Format::bytes == 1>::Stages;
  static constexpr int chunks = Problem::qk_dim / 32;
  static constexpr int tile_keys = KvStageTile::keys;
  static constexpr int array = tiles > 0 ? tiles : 1;
  using Shares = RowShares<Policy, Problem>;
  static constexpr int key_groups = Shares::key_groups;
  static constexpr int ordinary = 2;  // of the second tile's accumulators, which make room for two of scores

 public:
  MLA_DEVICE RowSplitWave(const mla::DecodeParams& p, const mla::WorkItem& item, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds, int wave)
      : item_(item),
        rows_(rows),
        lane_(Lane::current()),
        wave_(wave),
        lds_(lds),
        key_group_(wave / Shares::waves),
        places_(lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      first_row_[r] = first_row + 16 * (wave % Shares::waves + r * Shares::busy);
      softmax_[r] = mla::RowSoftmax::empty();
      output_[r].clear();
    }
  }

  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    const int count = (item_.end_key - item_.first_key + tile_keys - 1) / tile_keys;
    if (count <= 0) return;
    const mla::KvSource source(p, Problem::Format::bytes, item_.sequence);
    Stages stages(source, item_, p.rope_cos_sin, count, lds_, lane_, wave_);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      const Lane lane = lane_.rematerialized();
      query_[r] = QueryTile<Problem>::load(p, rows_, first_row_[r], lane);
      if constexpr (Problem::Format::StoredQuery::bytes == 1) query_[r].reload(lds_ + Stages::own(wave_), lane);
      visible_[r] = min(item_.end_key, visible_keys(p, rows_, first_row_[r], lane));
    }
    if (tiles > 0) {
      visible_to_all_ =
          min(item_.end_key, uniform(rows_.visible_keys(p, mla::SequenceRows::token_of(p, first_row_[0]))));
    }
    wait_all_loads();

    if constexpr (key_groups == 1) {
      walk(stages, count);
    } else {
      walk_pairs(stages, count);
    }
  }

  // Makes each row's sum one, and one of the groups' results.
  MLA_DEVICE void finish() {
    const Lane lane = lane_.rematerialized();
#pragma unroll
    for (int r = 0; r < tiles; ++r) softmax_[r].sum = sum_over_groups(softmax_[r].sum, lane);
    if constexpr (key_groups > 1 && tiles > 0) {
      merge_groups<Policy, tiles>(lds_, wave_, key_group_, Shares::waves, lane, softmax_, output_);
    }
  }

  MLA_DEVICE void store(const mla::DecodeParams& p) {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_groups > 1 && key_group_ != r) continue;
      const Lane lane = lane_.rematerialized();
      const mla::RowSink<Policy, Element> sink(p, item_, rows_, first_row_[r] + lane.column);
      const mla::RowResult<Policy> result = sink.finish(softmax_[r].max, softmax_[r].sum);
      if (lane.group == 0) sink.store_lse(result.lse);
      const float weight = roundable(result.weight * value_scale<typename Problem::Format>(p));
      sink.template store<BLOCK_TILES, OUTPUT_BLOCKS * 4>([&](int i, mla::Vec<float, BLOCK_TILES>& values) {
        const int b = i / 4, e = i % 4;
        __builtin_amdgcn_sched_barrier(0);  // or all pieces are scaled before the first is stored
        if (e == 0) {
#pragma unroll
          for (int t = 0; t < BLOCK_TILES; ++t) pin_to_agpr(output_[r].tile[b][t]);
        }
#pragma unroll
        for (int t = 0; t < BLOCK_TILES; ++t) values[t] = output_[r].tile[b][t][e] * weight;
        return b * BLOCK_COLUMNS + lane.group * 32 + e * 8;
      });
    }
  }

 private:
  MLA_DEVICE void walk(Stages& stages, int count) {
    int filled = 0, used = 0;  // stages that the next tile is copied to and read from
    for (int n = 0; n < min(Stages::ahead, count); ++n) {
      stages.copy(n, filled);
      filled = Stages::next_stage(filled);
    }
    int first = item_.first_key;
    for (int n = 0; n < count; ++n) {
      stages.wait(n, used);
      mla::block_sync();
      if (n + Stages::ahead < count) stages.copy(n + Stages::ahead, filled);
      filled = Stages::next_stage(filled);
      accumulate(lds_ + used, first);
      used = Stages::next_stage(used);
      first += tile_keys;
    }
  }

  // Two tiles at a time, one for each group. What lands is the wave's own, so no wave waits for another's copies, only
  // for the stages to be free and then filled.
  MLA_DEVICE void walk_pairs(Stages& stages, int count) {
    for (int n = 0; n < min(2, count); ++n) stages.copy(n, 0);
    int first = item_.first_key;
    for (int n = 0; n < count; n += 2) {
      wait_vmcnt<0>();
      mla::block_sync();
      stages.convert(n, 0);
      if (n + 1 < count) stages.convert(n + 1, Stages::stage_bytes);
      mla::block_sync();
      if (n + 2 < count) stages.copy(n + 2, 0);
      if (n + 3 < count) stages.copy(n + 3, 0);
      if (n + key_group_ < count) accumulate(lds_ + key_group_ * Stages::stage_bytes, first + key_group_ * tile_keys);
      first += 2 * tile_keys;
    }
  }

  MLA_DEVICE void accumulate(LdsBytes tile, int first) {
    if (tiles == 0) return;
    f32x4 t[array];
    scores(tile, t);
    u32x4 values[4];
    read_values(tile, 0, values);
    if (__builtin_expect(first + tile_keys > visible_to_all_, false)) {
#pragma unroll
      for (int r = 0; r < tiles; ++r) t[r] = Softmax::mask(t[r], first, visible_[r], lane_);
    }
    rescale(t);
    u32x2 weights[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) weights[r] = Softmax::weights(t[r], scale_, softmax_[r]);
    add_values(tile, values, weights);
  }

  // Keys are read a group ahead of the products that use them.
  MLA_DEVICE void scores(LdsBytes tile, f32x4 (&t)[array]) {
    constexpr int rope_chunks = mla::ROPE / 32;
    constexpr int products = chunks + (Problem::rotate ? rope_chunks : 0);  // with the rests of turned rope parts
    constexpr int group = products % 3 == 0 ? 3 : 4;
    constexpr int groups = products / group;
#pragma unroll
    for (int r = 0; r < tiles; ++r) t[r] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    u32x4 keys[2][group];
    read_keys<group>(tile, 0, keys[0]);
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      if (g + 1 < groups) {
        read_keys<group>(tile, g + 1, keys[(g + 1) % 2]);
        wait_lgkmcnt<group>();
      } else {
        wait_lgkmcnt<0>();
      }
#pragma unroll
      for (int c = 0; c < group; ++c) {
#pragma unroll
        for (int r = 0; r < tiles; ++r) {
          const int n = g * group + c;
          t[r] = multiply_chunk<Element>(keys[g % 2][c], query_[r].chunk[n < chunks ? n : n - rope_chunks], t[r]);
        }
      }
    }
  }

  template <int group>
  MLA_DEVICE void read_keys(LdsBytes tile, int g, u32x4 (&keys)[group]) const {
#pragma unroll
    for (int c = 0; c < group; ++c) keys[c] = lds_read16(tile + places_.of_chunk(g * group + c));
  }
  MLA_DEVICE void read_values(LdsBytes tile, int b, u32x4 (&values)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = lds_read16(tile + places_.of_columns(b, j));
  }

  MLA_DEVICE void rescale(const f32x4 (&t)[array]) {
    bool exceeded = false;
    float largest[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      largest[r] = Softmax::largest(t[r]);
      exceeded |= softmax_[r].exceeded_by(largest[r] * scale_);
    }
    if (__builtin_expect(any_lane(exceeded), false)) {
#pragma unroll
      for (int r = 0; r < tiles; ++r) {
        const float factor = Softmax::raise_max(softmax_[r], largest[r], scale_, lane_);
        if (r == 1) {
          output_[r].template scale<ordinary>(factor);
        } else {
          output_[r].scale(factor);
        }
      }
    }
  }

  // `values` holds, or will, the first block of columns; each block is read while the one before is multiplied.
  MLA_DEVICE void add_values(LdsBytes tile, u32x4 (&values)[4], const u32x2 (&weights)[array]) {
    u32x4 next[4];
#pragma unroll
    for (int b = 0; b < OUTPUT_BLOCKS; ++b) {
      u32x4(&now)[4] = b % 2 ? next : values;
      if (b + 1 < OUTPUT_BLOCKS) {
        read_values(tile, b + 1, b % 2 ? values : next);
        wait_lgkmcnt<4>();
      } else {
        wait_lgkmcnt<0>();
      }
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const KeyColumns columns = transpose_pair(now[0][d], now[1][d], now[2][d], now[3][d]);
#pragma unroll
        for (int r = 0; r < tiles; ++r) {
          f32x4& first = output_[r].tile[b][2 * d];
          f32x4& second = output_[r].tile[b][2 * d + 1];
          first = Mfma16x16x16<Element>::multiply(columns.first, weights[r], first);
          second = Mfma16x16x16<Element>::multiply(columns.second, weights[r], second);
          if (r == 1 && b * BLOCK_TILES + 2 * d >= OUTPUT_BLOCKS * BLOCK_TILES - ordinary) {
            pin_to_vgpr(first);
            pin_to_vgpr(second);
          }
        }
      }
    }
  }

  MLA_DEVICE static int min(int a, int b) { return a < b ? a : b; }

  const mla::WorkItem item_;
  const mla::SequenceRows rows_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;
  const int key_group_;
  const KvStageReadMap places_;
  const float scale_;
  int visible_to_all_;
  int first_row_[array];
  int visible_[array];
  mla::RowSoftmax softmax_[array];
  QueryTile<Problem> query_[array];
  AccumO output_[array];
};

template <class Policy, class Problem>
template <int tiles>
MLA_DEVICE void RowSplitDecode<Policy, Problem>::run_wave(LdsBytes lds, int wave) {
  const int first_row = mla::block_id_y() * Problem::rows;
  for (TileScheduler<DecodeSequences> scheduler(reread_params<mla::DecodeParams>(), mla::block_id_x()); scheduler.has_next();) {
    const mla::DecodeParams& p = reread_params<mla::DecodeParams>();
    mla::WorkItem item = scheduler.fetch_next(p, [&](int b) { return p.seq_lens[b]; });
    const mla::SequenceRows rows = mla::SequenceRows::of(p, item.sequence);
    if (first_row >= rows.rows) item.end_key = item.first_key;  // no query row: nothing to read
    RowSplitWave<Policy, Problem, tiles> part(p, item, rows, first_row, lds, wave);
    part.attend(p);
    part.finish();
    part.store(reread_params<mla::DecodeParams>());
    if (Shares::key_groups == 1) mla::block_sync();  // key groups begin with one, before anything shared is written
  }
}

}  // namespace cdna
