// Decode of 32 to 128 rows with transposed LDS reads: the waves share tiles of keys in LDS and split the query rows,
// wave w taking the 16-row tiles w and w + 4. Nothing of the softmax crosses a wave; one barrier per tile hands a
// landed stage over and frees the one before it.
//
// Where keys or values change their type on the way, up to 64 rows are split in two ways: two waves over rows, two over
// the keys of a tile. Each conversion and each LDS read then serves two row tiles; the results are merged when the item
// ends.
#pragma once

#include "cdna/kernel_params.hpp"
#include "cdna/slot_ring.hpp"
#include "cdna/wide_products.hpp"
#include "cdna/work_list.hpp"
#include "common/epilogue.hpp"

namespace cdna {

template <class Policy, class Problem, class Arithmetic>
class WideRowSplit {
  using Ring = SlotRing<Policy, Problem, Arithmetic::shared_keys>;
  static constexpr int waves = Policy::waves;
  static constexpr int key_groups = Arithmetic::splits_keys && Problem::row_tiles <= waves ? 2 : 1;
  static constexpr int row_waves = waves / key_groups;

 public:
  static constexpr int threads = waves * WAVE;
  static constexpr int lds_bytes = Ring::bytes;

  MLA_DEVICE static void run(LdsBytes lds) {
    const int wave = wave_id();
    constexpr int most = (Problem::row_tiles + row_waves - 1) / row_waves;
    constexpr int full_waves =
        Problem::row_tiles - (most - 1) * row_waves;  // with `most` tiles; the others have one less
    if (full_waves == row_waves || wave % row_waves < full_waves) {
      run_wave<most>(lds, wave);
    } else {
      run_wave<most - 1>(lds, wave);
    }
  }

 private:
  template <int tiles>
  MLA_DEVICE static void run_wave(LdsBytes lds, int wave);
};

// One wave's part: `tiles` 16-row tiles against every key of an item. A wave without rows still copies its keys.
template <class Policy, class Problem, class Arithmetic, int tiles, int key_groups>
class WideRowSplitWave {
  using Element = typename Problem::Element;
  using Scores = typename Arithmetic::Scores;
  using Values = typename Arithmetic::SharedValues;
  using Query = typename Scores::Query;
  using Ring = SlotRing<Policy, Problem, Arithmetic::shared_keys>;
  using Tile = SlottedTile<Problem::Format::bytes, Problem::row_bytes, Arithmetic::shared_keys>;
  static constexpr int shared_keys = Arithmetic::shared_keys;
  static constexpr int tile_keys = shared_keys / key_groups;  // of a shared tile, that the wave multiplies
  static constexpr int score_tiles = tile_keys / 16;
  static constexpr int row_waves = Policy::waves / key_groups;
  static constexpr int array = tiles > 0 ? tiles : 1;
  static constexpr int ordinary = 4;  // of the second row tile's accumulators, which make room for those of scores
  using Softmax = WideSoftmax<Policy, Values, score_tiles>;
  static constexpr int products = Softmax::products;

 public:
  MLA_DEVICE WideRowSplitWave(const mla::DecodeParams& p, const mla::WorkItem& item, const mla::SequenceRows& rows,
                              int first_row, LdsBytes lds, int wave)
      : item_(item),
        rows_(rows),
        lane_(Lane::current()),
        wave_(wave),
        lds_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds))),
        key_group_(wave / row_waves),
        pieces_(lane_),
        columns_(lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
    pieces_.first += key_group_ * (tile_keys / 8 * Tile::group_bytes);
    pieces_.tail += key_group_ * (tile_keys * 64);
    columns_.first += key_group_ * (tile_keys / 8 * Tile::group_bytes);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      first_row_[r] = first_row + 16 * (wave % row_waves + r * row_waves);
      softmax_[r].clear();
      output_[r].clear();
    }
  }

  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    const int count = (item_.end_key - item_.first_key + shared_keys - 1) / shared_keys;
    if (count <= 0) return;
    const mla::KvSource source(p, Problem::Format::bytes, item_.sequence);
    Ring ring(source, item_, p.rope_cos_sin, count, lds_, lane_, wave_);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      query_[r] = Query::load(p, rows_, first_row_[r], lane_);
      visible_[r] = smaller(item_.end_key, visible_keys(p, rows_, first_row_[r], lane_));
    }
    if (tiles > 0) {
      visible_to_all_ =
          smaller(item_.end_key, uniform(rows_.visible_keys(p, mla::SequenceRows::token_of(p, first_row_[0]))));
    }
    wait_loads();

    uint32_t filled = 0, used = 0;  // stages that the next tile is copied to and read from
    for (int n = 0; n < smaller(Ring::ahead, count); ++n) {
      ring.copy(n, filled);
      filled = Ring::stage_after(filled);
    }
    int first = item_.first_key + key_group_ * tile_keys;
    for (int n = 0; n < count; ++n) {
      ring.wait(n, used);
      mla::block_sync();
      if (n + Ring::ahead < count) ring.copy(n + Ring::ahead, filled);
      filled = Ring::stage_after(filled);
      accumulate(lds_ + used, first);
      used = Ring::stage_after(used);
      first += shared_keys;
    }
  }

  // Makes each row's sums one, and one of the groups' results.
  MLA_DEVICE void finish() {
    const Lane lane = lane_.rederived();
#pragma unroll
    for (int r = 0; r < tiles; ++r) softmax_[r].join(lane);
    if constexpr (key_groups > 1) merge_groups(lane);
  }

  MLA_DEVICE void store(const mla::DecodeParams& p) const {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_groups > 1 && key_group_ != r) continue;
      const Lane lane = lane_.rederived();
      const mla::RowSink<Policy, Element> sink(p, item_, rows_, first_row_[r] + lane.column);
      const float sum = softmax_[r].sum;
      const float divisor = softmax_[r].divisor();
      const mla::RowResult<Policy> result = sink.finish(softmax_[r].max, sum);
      if (lane.group == 0) sink.store_lse(result.lse);
      const float weight =
          Softmax::output_weight(result.weight, sum, divisor) * value_scale<typename Problem::Format>(p);
      sink.template store<4, WideOutput::tiles>([&](int t, mla::Vec<float, 4>& values) {
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = output_[r].tile[t][e] * weight;
        return 16 * t + 4 * lane.group;
      });
    }
  }

 private:
  // Each wave and the one `row_waves` apart hold the same rows of other keys. The wave of group r keeps row tile r and
  // gives the other away through LDS, which no stage needs any more.
  MLA_DEVICE void merge_groups(const Lane& lane) {
    static_assert(key_groups == 2 && tiles <= 2 && !Values::coarse, "merging: two groups, a row tile for each");
    constexpr int output_bytes = WideOutput::tiles * WAVE * 16;
    constexpr int statistics = Policy::waves * output_bytes;  // [wave][row tile][max, sum][16 rows]
    static_assert(statistics + Policy::waves * 256 <= Ring::bytes, "merging: outputs of four waves fit the stages");
    const uint32_t mine = lds_ + statistics + wave_ * 256 + lane.column * 4;
    const uint32_t other = lds_ + statistics + (wave_ ^ row_waves) * 256 + lane.column * 4;
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (lane.group == 0) {
        lds_write_float(lds_place(mine + r * 128), softmax_[r].max);
        lds_write_float(lds_place(mine + r * 128 + 64), softmax_[r].sum);
      }
      if (key_group_ != r) {
#pragma unroll
        for (int t = 0; t < WideOutput::tiles; ++t) {
          keep(r, t);
          lds_write_f32x4(lds_place(lds_ + wave_ * output_bytes + t * (WAVE * 16) + lane.index * 16),
                          output_[r].tile[t]);
          if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);
        }
      }
    }
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_group_ != r) continue;
      const float other_max = lds_read_float(lds_place(other + r * 128));
      const float max = __builtin_fmaxf(softmax_[r].max, other_max);
      const float weight = Policy::exp2(softmax_[r].max - max);
      const float other_weight = Policy::exp2(other_max - max);
      softmax_[r].max = max;
      softmax_[r].sum = softmax_[r].sum * weight + lds_read_float(lds_place(other + r * 128 + 64)) * other_weight;
#pragma unroll
      for (int t = 0; t < WideOutput::tiles; ++t) {
        const uint32_t at = lds_ + (wave_ ^ row_waves) * output_bytes + t * (WAVE * 16) + lane.index * 16;
        keep(r, t);
        output_[r].tile[t] = output_[r].tile[t] * weight + lds_read_f32x4(lds_place(at)) * other_weight;
        keep(r, t);
        if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);
      }
    }
  }

  MLA_DEVICE void keep(int r, int t) {
    if (r == 0 || t < WideOutput::tiles - ordinary) keep_accumulated(output_[r].tile[t]);
  }

  MLA_DEVICE void accumulate(uint32_t tile, int first) {
    if (tiles == 0) return;
    f32x4 t[array][score_tiles];
    scores(tile, t);
    u32x2 values[column_group][reads];
    read_values(tile, 0, values);
    if (__builtin_expect(first + tile_keys > visible_to_all_, false)) {
#pragma unroll
      for (int r = 0; r < tiles; ++r) Softmax::mask(t[r], first, visible_[r], lane_.rederived());
    }
    rescale(t);
    typename Softmax::Weights weights[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) Softmax::weigh(t[r], scale_, softmax_[r], weights[r]);
    add_values(tile, values, weights);
  }

  // A step is one 128-byte block of 32 keys' rows, or their tails; keys are read a step ahead of the products.
  static constexpr int steps_of_rows = Tile::blocks + (Tile::has_tail || Problem::rotate ? 1 : 0);
  static constexpr int steps = steps_of_rows * (score_tiles / 2);
  MLA_DEVICE static constexpr bool is_tail(int s) { return Tile::has_tail && s % steps_of_rows == Tile::blocks; }
  MLA_DEVICE static constexpr int reads_of(int s) { return is_tail(s) ? 2 : 4; }

  MLA_DEVICE void scores(uint32_t tile, f32x4 (&t)[array][score_tiles]) {
#pragma unroll
    for (int r = 0; r < tiles; ++r)
#pragma unroll
      for (int T = 0; T < score_tiles; ++T) t[r][T] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    u32x4 keys[2][2][2];  // [step][key tile][piece]
    read_keys(tile, 0, keys[0]);
    multiply_steps<0>(tile, keys, t);
  }

  template <int s>
  MLA_DEVICE void multiply_steps(uint32_t tile, u32x4 (&keys)[2][2][2], f32x4 (&t)[array][score_tiles]) {
    if constexpr (s < steps) {
      if constexpr (s + 1 < steps) {
        read_keys(tile, s + 1, keys[(s + 1) % 2]);
        wait_lds<reads_of(s + 1)>();
      } else {
        wait_lds<0>();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32x4(&now)[2] = keys[s % 2][half];
        constexpr int n = s % steps_of_rows;
        const int T = s / steps_of_rows * 2 + half;
        if constexpr (is_tail(s)) {
          const auto left = Scores::tail(now[0], now[1]);  // now[1]: what these keys left there two steps before
#pragma unroll
          for (int r = 0; r < tiles; ++r) t[r][T] = Scores::multiply_tail(left, query_[r], t[r][T]);
        } else {
          constexpr int block = n < Tile::blocks ? n : Tile::blocks - 1;  // the rests meet the query's rope part again
          const auto left = Scores::keys(now[0], now[1]);
#pragma unroll
          for (int r = 0; r < tiles; ++r) t[r][T] = Scores::multiply(left, query_[r], block, t[r][T]);
        }
      }
      multiply_steps<s + 1>(tile, keys, t);
    }
  }

  MLA_DEVICE void read_keys(uint32_t tile, int s, u32x4 (&keys)[2][2]) const {
    const int n = s % steps_of_rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int T = s / steps_of_rows * 2 + half;
#pragma unroll
      for (int part = 0; part < reads_of(s) / 2; ++part) {
        if (n < Tile::blocks || Tile::has_tail) {
          keys[half][part] = lds_read16(pieces_.of(tile, T, 2 * n + part));
        } else {
          keys[half][part] = lds_read16(lds_place(((tile + Ring::rests + lane_rest()) ^ (part * 64)) + T * 2048));
        }
      }
    }
  }
  // Rests of turned keys lie like a block of the tile.
  MLA_DEVICE uint32_t lane_rest() const {
    const uint32_t column = static_cast<uint32_t>(lane_.column);
    return column / 8 * 1024 + column % 8 * 128 + (lane_.group ^ Tile::swizzle(column)) * 16;
  }

  MLA_DEVICE void rescale(const f32x4 (&t)[array][score_tiles]) {
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
        const float factor = Softmax::raise_reference(softmax_[r], largest[r], scale_, lane_.rederived());
        if (r == 1) {
          output_[r].template scale<ordinary>(factor);
        } else {
          output_[r].scale(factor);
        }
      }
    }
  }

  static constexpr int reads = products * Values::reads;  // per column tile
  static constexpr int column_group = 8 / reads;          // column tiles that are read at once
  static constexpr int column_groups = WideOutput::tiles / column_group;
  static constexpr int pair = tiles == 1 && column_group > 1 ? 2 : 1;

  MLA_DEVICE void read_values(uint32_t tile, int g, u32x2 (&values)[column_group][reads]) const {
#pragma unroll
    for (int c = 0; c < column_group; ++c)
#pragma unroll
      for (int n = 0; n < reads; ++n) values[c][n] = columns_.read(tile, g * column_group + c, n);
  }

  // `values` holds, or will, the first group of columns; each group is read while the one before is multiplied.
  MLA_DEVICE void add_values(uint32_t tile, u32x2 (&values)[column_group][reads],
                             const typename Softmax::Weights (&weights)[array]) {
    u32x2 next[column_group][reads];
#pragma unroll
    for (int g = 0; g < column_groups; ++g) {
      u32x2(&now)[column_group][reads] = g % 2 ? next : values;
      if (g + 1 < column_groups) {
        read_values(tile, g + 1, g % 2 ? values : next);
        wait_lds<column_group * reads>();
      } else {
        wait_lds<0>();
      }
      // Two column tiles or row tiles in turn, so that no product follows one into the same accumulator.
#pragma unroll
      for (int c = 0; c < column_group; c += pair) {
        typename Values::Columns columns[pair][Softmax::products];
#pragma unroll
        for (int i = 0; i < pair * Softmax::products; ++i) {
          u32x2 read[Values::reads];
#pragma unroll
          for (int k = 0; k < Values::reads; ++k) read[k] = now[c + i % pair][i / pair * Values::reads + k];
          columns[i % pair][i / pair] = Values::columns(read);
        }
        if (Values::converted)
          __builtin_amdgcn_sched_barrier(0);  // or a product follows each conversion, and waits for it
#pragma unroll
        for (int i = 0; i < pair * Softmax::products; ++i) {
#pragma unroll
          for (int r = 0; r < tiles; ++r) {
            const int column = g * column_group + c + i % pair;
            f32x4& sum = output_[r].tile[column];
            sum = Values::multiply(columns[i % pair][i / pair], weights[r][i / pair], sum);
            if (r == 1 && column >= WideOutput::tiles - ordinary) keep_ordinary(sum);
          }
        }
      }
    }
  }

  MLA_DEVICE static int smaller(int a, int b) { return a < b ? a : b; }

  const mla::WorkItem item_;
  const mla::SequenceRows rows_;
  const Lane lane_;
  const int wave_;
  const uint32_t lds_;
  const int key_group_;
  PiecePlaces<Tile> pieces_;
  ColumnPieces<Tile> columns_;
  const float scale_;
  int visible_to_all_;
  int first_row_[array];
  int visible_[array];
  typename Softmax::Row softmax_[array];
  Query query_[array];
  WideOutput output_[array];
};

template <class Policy, class Problem, class Arithmetic>
template <int tiles>
MLA_DEVICE void WideRowSplit<Policy, Problem, Arithmetic>::run_wave(LdsBytes lds, int wave) {
  const int first_row = mla::block_id_y() * Problem::rows;
  for (WorkList<DecodeSequences> work(reread_params<mla::DecodeParams>(), mla::block_id_x()); work.more();) {
    const mla::DecodeParams& p = reread_params<mla::DecodeParams>();
    mla::WorkItem item = work.take(p, [&](int b) { return p.seq_lens[b]; });
    const mla::SequenceRows rows = mla::SequenceRows::of(p, item.sequence);
    if (first_row >= rows.rows) item.end_key = item.first_key;  // no query row: nothing to read
    item.partial_row = uniform(item.partial_row);  // or LLVM 20 keeps it, from a plan, in four registers of every lane
    WideRowSplitWave<Policy, Problem, Arithmetic, tiles, key_groups> part(p, item, rows, first_row, lds, wave);
    part.attend(p);
    part.finish();
    part.store(reread_params<mla::DecodeParams>());
    mla::block_sync();
  }
}

}  // namespace cdna
