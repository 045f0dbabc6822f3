// Decode of up to 16 rows: four waves take every fourth tile of the item and never meet until it ends.
//
// A wave loads its keys from memory straight into matrix operands (no barrier), multiplies them, and stores the same
// registers into its private quarter of LDS, from which it reads them back by column for the second product. As soon as
// a register is free the next tile's load is issued into it, so 36 KiB per wave stay in flight.
#pragma once

#include "cdna/kernel_params.hpp"
#include "cdna/rope.hpp"
#include "cdna/wide_products.hpp"
#include "cdna/work_list.hpp"
#include "common/epilogue.hpp"
#include "common/kv_source.hpp"

namespace cdna {

template <class Policy, class Problem, class Arithmetic>
class WideKeySplit {
  using Element = typename Problem::Element;
  using Scores = typename Arithmetic::Scores;
  using Values = typename Arithmetic::PrivateValues;
  using Query = typename Scores::Query;
  static_assert(Problem::row_tiles == 1, "key-split decode: a wave holds the output of one 16-row tile");

  static constexpr int waves = Policy::waves;
  static constexpr int tile_keys = Arithmetic::private_keys;
  static constexpr int score_tiles = tile_keys / 16;
  static constexpr int pieces = Problem::row_bytes / 64;  // 16-byte loads of a lane per 16 keys
  static constexpr bool has_tail = pieces % 2 != 0;
  static constexpr int freed = has_tail && Scores::pads_tail ? pieces - 3 : pieces;  // before the tail's product
  static constexpr int latent_pieces = mla::LATENT * Problem::Format::bytes / 64;
  using Tile = SlottedTile<Problem::Format::bytes, mla::LATENT * Problem::Format::bytes, tile_keys>;
  using Softmax = WideSoftmax<Policy, Values, score_tiles>;

  static constexpr int output_bytes = WideOutput::tiles * WAVE * 16;  // of a wave
  static constexpr int wave_bytes = Tile::bytes > output_bytes ? Tile::bytes : output_bytes;
  static constexpr int statistics = waves * wave_bytes;  // [2, or 3 with divisors][wave][16 rows]
  static constexpr int row_floats = waves * 16 * 4;

 public:
  static constexpr int threads = waves * WAVE;
  static constexpr int lds_bytes = statistics + (Values::coarse ? 3 : 2) * row_floats;

  MLA_DEVICE static void run(LdsBytes lds) {
    const int first_row = mla::block_id_y() * Problem::rows;
    for (WorkList<DecodeSequences> work(reread_params<mla::DecodeParams>(), mla::block_id_x()); work.more();) {
      const mla::DecodeParams& p = reread_params<mla::DecodeParams>();
      mla::WorkItem item = work.take(p, [&](int b) { return p.seq_lens[b]; });
      const mla::SequenceRows rows = mla::SequenceRows::of(p, item.sequence);
      if (first_row >= rows.rows) item.end_key = item.first_key;  // no query row: nothing to read
      WideKeySplit decode(p, item, rows, first_row, lds);
      decode.attend(p);
      decode.merge_and_store(reread_params<mla::DecodeParams>());
    }
  }

 private:
  struct Keys {
    u32x4 piece[score_tiles][pieces];  // of key 16 T + lane.column
  };
  struct Rows {
    const char* of[score_tiles];
  };

  MLA_DEVICE WideKeySplit(const mla::DecodeParams& p, const mla::WorkItem& item, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds)
      : item_(item),
        rows_(rows),
        first_row_(first_row),
        lane_(Lane::current()),
        wave_(wave_id()),
        lds_(lds),
        latent_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + wave_ * wave_bytes),
        places_(lane_),
        columns_(lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
    softmax_.clear();
  }

  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    output_.clear();
    const int tiles = (item_.end_key - item_.first_key + tile_keys - 1) / tile_keys;
    if (wave_ >= tiles) return;
    const mla::KvSource source(p, Problem::Format::bytes, item_.sequence);
    query_ = Query::load(p, rows_, first_row_, lane_);
    visible_ = smaller(item_.end_key, visible_keys(p, rows_, first_row_, lane_));
    visible_to_all_ =
        smaller(item_.end_key, uniform(rows_.visible_keys(p, mla::SequenceRows::token_of(p, first_row_))));

    int first = item_.first_key + wave_ * tile_keys;
    uint32_t page[score_tiles];
    find_pages(source, first, page);
    load_keys(rows_of(source, first, page));
    load_turns(p, first);
    find_pages(source, first + step, page);
    for (int left = (tiles - 1 - wave_) / waves; left > 0; --left) {
      const Rows next = rows_of(source, first + step, page);
      find_pages(source, first + 2 * step, page);
      f32x4 t[score_tiles];
      scores<true>(next, t);
      load_turns(p, first + step);
      accumulate(t, first);
      first += step;
    }
    f32x4 t[score_tiles];
    scores<false>(Rows{}, t);
    accumulate(t, first);
  }

  // The lane's key of score tile T of the tile that begins at `first`; past the item's end its last key, masked later.
  MLA_DEVICE uint32_t key_at(int first, int T) const {
    const int key = first + 16 * T + lane_.column;
    return static_cast<uint32_t>(key < item_.end_key ? key : item_.end_key - 1);
  }
  MLA_DEVICE void find_pages(const mla::KvSource& source, int first, uint32_t (&page)[score_tiles]) const {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) page[T] = source.page_of(key_at(first, T));
  }
  MLA_DEVICE Rows rows_of(const mla::KvSource& source, int first, const uint32_t (&page)[score_tiles]) const {
    Rows rows;
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) rows.of[T] = source.row(page[T], key_at(first, T)) + lane_.group * 16;
    return rows;
  }

  MLA_DEVICE void load_keys(const Rows& rows) {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T)
#pragma unroll
      for (int m = 0; m < pieces; ++m) keys_.piece[T][m] = *reinterpret_cast<const u32x4*>(rows.of[T] + m * 64);
  }

  MLA_DEVICE void load_turns(const mla::DecodeParams& p, int first) {
    if constexpr (Problem::rotate) {
#pragma unroll
      for (int T = 0; T < score_tiles; ++T) {
        turns_[T] =
            ChunkTurns::load(p.rope_cos_sin + static_cast<int64_t>(key_at(first, T)) * TURN_FLOATS + lane_.group * 8);
      }
    }
  }

  // S^T of the keys in registers, which go to LDS for the second product and make room for those at `next`.
  template <bool prefetch>
  MLA_DEVICE void scores(const Rows& next, f32x4 (&t)[score_tiles]) {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) {
      u32x4(&piece)[pieces] = keys_.piece[T];
      f32x4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < pieces / 2; ++n) {
        u32x4& low = piece[2 * n];
        u32x4& high = piece[2 * n + 1];
        if constexpr (Problem::rotate) {
          if (2 * n == latent_pieces) {
            u32x4 rest[2];
            turns_[T].template turn<Policy, Element>(low, high, rest);
            sum = Scores::multiply(Scores::keys(rest[0], rest[1]), query_, n, sum);
          }
        }
        if (2 * n < latent_pieces) {
          lds_write16(places_.of(latent_, T, 2 * n), low);
          lds_write16(places_.of(latent_, T, 2 * n + 1), high);
        }
        sum = Scores::multiply(Scores::keys(low, high), query_, n, sum);
        if (prefetch && 2 * n < freed) {
          low = *reinterpret_cast<const u32x4*>(next.of[T] + 2 * n * 64);
          high = *reinterpret_cast<const u32x4*>(next.of[T] + (2 * n + 1) * 64);
        }
      }
      if constexpr (has_tail) {
        u32x4& last = piece[pieces - 1];
        sum = Scores::multiply_tail(Scores::tail(last, piece[pieces - 3]), query_, sum);
        if (prefetch && Scores::pads_tail) {
          piece[pieces - 3] = *reinterpret_cast<const u32x4*>(next.of[T] + (pieces - 3) * 64);
          piece[pieces - 2] = *reinterpret_cast<const u32x4*>(next.of[T] + (pieces - 2) * 64);
        }
        if (prefetch) last = *reinterpret_cast<const u32x4*>(next.of[T] + (pieces - 1) * 64);
      }
      t[T] = sum;
    }
  }

  // Softmax of the tile that begins at key `first`, and its values added to the output.
  MLA_DEVICE void accumulate(f32x4 (&t)[score_tiles], int first) {
    if (__builtin_expect(first + tile_keys > visible_to_all_, false)) Softmax::mask(t, first, visible_, lane_);
    const float largest = Softmax::largest(t);
    if (__builtin_expect(any_lane(softmax_.exceeded_by(largest * scale_)), false)) {
      output_.scale(Softmax::raise_reference(softmax_, largest, scale_, lane_));
    }
    typename Softmax::Weights weights;
    Softmax::weigh(t, scale_, softmax_, weights);
    wave_lds_fence();
    add_values(weights);
    wave_lds_fence();
  }

  static constexpr int reads = Softmax::products * Values::reads;  // per column tile
  static constexpr int column_group = 8 / reads;                   // column tiles that are read at once
  static constexpr int column_groups = WideOutput::tiles / column_group;
  static constexpr int pair = column_group > 1 ? 2 : 1;

  MLA_DEVICE void read_values(int g, u32x2 (&values)[column_group][reads]) const {
#pragma unroll
    for (int c = 0; c < column_group; ++c)
#pragma unroll
      for (int n = 0; n < reads; ++n) values[c][n] = columns_.read(latent_, g * column_group + c, n);
  }

  // Each group of columns is read while the one before is multiplied.
  MLA_DEVICE void add_values(const typename Softmax::Weights& weights) {
    u32x2 values[2][column_group][reads];
    read_values(0, values[0]);
#pragma unroll
    for (int g = 0; g < column_groups; ++g) {
      const u32x2(&now)[column_group][reads] = values[g % 2];
      if (g + 1 < column_groups) {
        read_values(g + 1, values[(g + 1) % 2]);
        wait_lds<column_group * reads>();
      } else {
        wait_lds<0>();
      }
      // Two column tiles in turn, so that no product follows one into the same accumulator.
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
          f32x4& sum = output_.tile[g * column_group + c + i % pair];
          sum = Values::multiply(columns[i % pair][i / pair], weights[i / pair], sum);
        }
      }
    }
  }

  // The four waves' rows become one: statistics and outputs through LDS, each wave adding up a quarter of the columns.
  MLA_DEVICE void merge_and_store(const mla::DecodeParams& p) {
    const int mine = statistics + (wave_ * 16 + lane_.column) * 4;
    softmax_.join(lane_);
    if (lane_.group == 0) {
      lds_write_float(lds_ + mine, softmax_.max);
      lds_write_float(lds_ + mine + row_floats, softmax_.sum);
      if (Values::coarse) lds_write_float(lds_ + mine + 2 * row_floats, softmax_.divisor());
    }
#pragma unroll
    for (int t = 0; t < WideOutput::tiles; ++t) {
      lds_write_f32x4(lds_ + wave_ * wave_bytes + t * (WAVE * 16) + lane_.index * 16, output_.tile[t]);
    }
    mla::block_sync();
    float weight[waves];
    float max = mla::RowSoftmax::NOTHING;
    float total = 0.0f;
    float total_divisor = 0.0f;
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      weight[w] = lds_read_float(lds_ + statistics + (w * 16 + lane_.column) * 4);
      max = __builtin_fmaxf(max, weight[w]);
    }
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      const LdsBytes row = lds_ + statistics + (w * 16 + lane_.column) * 4;
      weight[w] = Policy::exp2(weight[w] - max);
      total += weight[w] * lds_read_float(row + row_floats);
      if (Values::coarse) total_divisor += weight[w] * lds_read_float(row + 2 * row_floats);
    }
    const mla::RowSink<Policy, Element> sink(p, item_, rows_, first_row_ + lane_.column);
    const mla::RowResult<Policy> result = sink.finish(max, total);
    if (wave_ == 0 && lane_.group == 0) sink.store_lse(result.lse);
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      weight[w] *=
          Softmax::output_weight(result.weight, total, total_divisor) * value_scale<typename Problem::Format>(p);
    }

    constexpr int share = WideOutput::tiles / waves;
    f32x4 merged[share];
#pragma unroll
    for (int n = 0; n < share; ++n) {
      merged[n] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < waves; ++w) {
        merged[n] +=
            weight[w] * lds_read_f32x4(lds_ + w * wave_bytes + (wave_ * share + n) * (WAVE * 16) + lane_.index * 16);
      }
    }
    sink.template store<4, share>([&](int n, mla::Vec<float, 4>& values) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = merged[n][e];
      return 16 * (wave_ * share + n) + 4 * lane_.group;
    });
    mla::block_sync();
  }

  MLA_DEVICE static int smaller(int a, int b) { return a < b ? a : b; }

  static constexpr int step = waves * tile_keys;

  const mla::WorkItem item_;
  const mla::SequenceRows rows_;
  const int first_row_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;     // the workgroup's
  const uint32_t latent_;  // the wave's quarter
  const PiecePlaces<Tile> places_;
  const ColumnPieces<Tile> columns_;
  const float scale_;
  int visible_;         // to the lane's row
  int visible_to_all_;  // rows of the tile
  Query query_;
  Keys keys_;
  ChunkTurns turns_[score_tiles];  // of the rope part of keys_
  typename Softmax::Row softmax_;
  WideOutput output_;
};

}  // namespace cdna
