// The mainloop for up to 16 rows: the four waves take every fourth tile of the work tile and never meet until it ends.
//
// Each wave does flash decoding of its own. It multiplies its keys from the registers they were loaded to (no barrier),
// and stores the same registers into its private quarter of LDS, from which transposed reads bring them back by column
// for PV. The registers serve as a double buffer, so 36 KiB per wave stay in flight. The four results are combined when
// the tile ends.
#pragma once

#include "cdna/common/lds.hpp"
#include "cdna/common/score_scale.hpp"
#include "cdna/decode/accum_o.hpp"
#include "cdna/decode/mfma_16x16x32/producer_registers.hpp"
#include "cdna/decode/mfma_16x16x32/products.hpp"
#include "cdna/decode/row_mask.hpp"
#include "cdna/decode/softmax.hpp"
#include "common/paged_kv.hpp"

namespace cdna::mfma_16x16x32 {

// LDS of a wave: its keys, later its partial output. Behind all waves: row statistics, [max, sum and, where P is
// normalized by its rounded sum, the divisor][wave][16 rows].
template <class Problem, class Policy, class Mma>
struct KeySplitLds {
  using Tile = SwizzledLdsTile<Problem::Format::bytes, Problem::latent * Problem::Format::bytes, Mma::private_keys>;
  using Output = AccumO<Problem::latent>;
  static constexpr int output_bytes = Output::tiles * WAVE * 16;
  static constexpr int wave_bytes = Tile::bytes > output_bytes ? Tile::bytes : output_bytes;
  static constexpr int statistics = Policy::waves * wave_bytes;
  static constexpr int row_floats = Policy::waves * 16 * 4;  // bytes of a float of every row of every wave
  static constexpr int bytes = statistics + (Mma::PrivatePv::normalizes_by_rounded_sum ? 3 : 2) * row_floats;
};

template <class Problem, class Policy, class Mma>
class KeySplitWave;

template <class Problem, class Policy, class Mma>
struct KeySplitMainloop {
  static constexpr int lds_bytes = KeySplitLds<Problem, Policy, Mma>::bytes;
  static constexpr bool sync_after_tile = true;
  static constexpr bool scalar_partial_row = false;

  template <class Kernel>
  MLA_DEVICE static void run_waves(LdsBytes lds) {
    Kernel::template run_wave<KeySplitWave<Problem, Policy, Mma>>(lds, wave_id());
  }
};

// One wave's part: all rows against every fourth tile of keys.
template <class Problem, class Policy, class Mma>
class KeySplitWave {
  using Element = typename Problem::Element;
  using Qk = typename Mma::Qk;
  using Pv = typename Mma::PrivatePv;
  using Query = typename Qk::Query;
  static_assert(Problem::row_tiles == 1, "key-split decode: a wave holds the output of one 16-row tile");

  static constexpr int waves = Policy::waves;
  static constexpr int tile_keys = Mma::private_keys;
  static constexpr int score_tiles = tile_keys / 16;
  using Registers = KvRegisters<Problem, tile_keys>;
  static constexpr int pieces = Registers::loads;
  static constexpr bool has_tail = pieces % 2 != 0;
  static constexpr int freed = has_tail && Qk::pads_tail ? pieces - 3 : pieces;  // before the tail's product
  static constexpr int latent_pieces = Problem::latent * Problem::Format::bytes / 64;
  using Lds = KeySplitLds<Problem, Policy, Mma>;
  using Tile = typename Lds::Tile;
  using Output = typename Lds::Output;
  using Softmax = TileSoftmax<Policy, Pv, score_tiles>;
  static constexpr int wave_bytes = Lds::wave_bytes, statistics = Lds::statistics, row_floats = Lds::row_floats;

 public:
  MLA_DEVICE KeySplitWave(const mla::DecodeParams& p, const mla::WorkTile& tile, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds, int)
      : tile_(tile),
        rows_(rows),
        first_row_(first_row),
        lane_(Lane::current()),
        wave_(wave_id()),
        lds_(lds),
        latent_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + wave_ * wave_bytes),
        key_map_(lane_),
        column_map_(lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
    softmax_.clear();
  }

  // QK^T, softmax and PV over the wave's tiles of the work tile.
  template <class Producer>
  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    output_.clear();
    const int tiles = (tile_.end_key - tile_.first_key + tile_keys - 1) / tile_keys;
    if (wave_ >= tiles) return;
    const mla::PagedKv paged_kv(p, Problem::Format::bytes, tile_.sequence);
    Producer producer(paged_kv, tile_, lane_, kv_);
    int first = tile_.first_key + wave_ * tile_keys;
    producer.begin(first);
    query_ = Query::load(p, rows_, first_row_, lane_);
    whole_ = WholeTiles::of<tile_keys>(p, rows_, tile_, first_row_);
    mask_ = RowMask::of(p, rows_, tile_, whole_.first, first_row_, lane_);
    producer.start(p, first);
    for (int left = (tiles - 1 - wave_) / waves; left > 0; --left) {
      producer.advance(first);
      f32x4 s[score_tiles];
      scores<true>(producer, s);
      producer.refill_cos_sin(p, first);
      accumulate(s, first);
      first += Producer::step;
    }
    f32x4 s[score_tiles];
    scores<false>(producer, s);
    accumulate(s, first);
  }

  MLA_DEVICE void finish() {}

  // The four waves' rows become one and are stored: row statistics and outputs go through LDS, and each wave adds up a
  // quarter of the columns.
  template <class Epilogue>
  MLA_DEVICE void store(const mla::DecodeParams& p) {
    const float value_scale = Epilogue::value_scale(p);
    const Epilogue target(p, tile_, rows_, first_row_ + lane_.column);
    const int mine = statistics + (wave_ * 16 + lane_.column) * 4;
    softmax_.join(lane_);
    if (lane_.group == 0) {
      lds_write_float(lds_ + mine, softmax_.max);
      lds_write_float(lds_ + mine + row_floats, softmax_.sum);
      if (Pv::normalizes_by_rounded_sum) lds_write_float(lds_ + mine + 2 * row_floats, softmax_.divisor());
    }
#pragma unroll
    for (int t = 0; t < Output::tiles; ++t) {
      lds_write_f32x4(lds_ + wave_ * wave_bytes + t * (WAVE * 16) + lane_.index * 16, output_.tile[t]);
    }
    mla::block_sync();
    float scale[waves];
    float max = mla::RowSoftmax::LOWEST;
    float total = 0.0f;
    float total_divisor = 0.0f;
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      scale[w] = lds_read_float(lds_ + statistics + (w * 16 + lane_.column) * 4);
      max = __builtin_fmaxf(max, scale[w]);
    }
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      const LdsBytes row = lds_ + statistics + (w * 16 + lane_.column) * 4;
      scale[w] = Policy::exp2(scale[w] - max);
      total += scale[w] * lds_read_float(row + row_floats);
      if (Pv::normalizes_by_rounded_sum) total_divisor += scale[w] * lds_read_float(row + 2 * row_floats);
    }
    const mla::RowResult<Policy> result = target.finish(max, total);
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      scale[w] *= Softmax::output_scale(result.scale, total, total_divisor) * value_scale;
    }

    constexpr int share = Output::tiles / waves;
    f32x4 combined[share];
#pragma unroll
    for (int n = 0; n < share; ++n) {
      combined[n] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < waves; ++w) {
        combined[n] +=
            scale[w] * lds_read_f32x4(lds_ + w * wave_bytes + (wave_ * share + n) * (WAVE * 16) + lane_.index * 16);
      }
    }
    target.template store<4, share>([&](int n, mla::Vec<float, 4>& values) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = combined[n][e];
      return 16 * (wave_ * share + n) + 4 * lane_.group;
    });
    if (wave_ == 0 && lane_.group == 0) target.store_lse(result.lse);
  }

 private:
  // S^T of the keys in registers. Their latent part goes to LDS for PV, and each register is refilled once it is free.
  template <bool prefetch, class Producer>
  MLA_DEVICE void scores(Producer& producer, f32x4 (&s)[score_tiles]) {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) {
      u32x4(&piece)[pieces] = kv_.key[T];
      f32x4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < pieces / 2; ++n) {
        u32x4& low = piece[2 * n];
        u32x4& high = piece[2 * n + 1];
        if (2 * n < latent_pieces) {
          lds_write16(key_map_.of(latent_, T, 2 * n), low);
          lds_write16(key_map_.of(latent_, T, 2 * n + 1), high);
        }
        if constexpr (Problem::rotate) {
          if (2 * n == latent_pieces) {  // a copy is rotated: in place LLVM 22 spills
            u32x4 first = low, second = high;
            kv_.cos_sin[T].template rotate<Policy, Element>(first, second);
            sum = Qk::multiply(Qk::keys(first, second), query_, n, sum);
          }
        }
        if (!Problem::rotate || 2 * n < latent_pieces) sum = Qk::multiply(Qk::keys(low, high), query_, n, sum);
        if (prefetch && 2 * n < freed) {
          producer.refill(T, 2 * n);
          producer.refill(T, 2 * n + 1);
        }
      }
      if constexpr (has_tail) {
        u32x4& last = piece[pieces - 1];
        sum = Qk::multiply_tail(Qk::tail(last, piece[pieces - 3]), query_, sum);
        if (prefetch && Qk::pads_tail) {
          producer.refill(T, pieces - 3);
          producer.refill(T, pieces - 2);
        }
        if (prefetch) producer.refill(T, pieces - 1);
      }
      s[T] = sum;
    }
  }

  // Softmax and PV of the tile that begins at key `first`.
  MLA_DEVICE void accumulate(f32x4 (&s)[score_tiles], int first) {
    const int position = first - whole_.first;
    if (__builtin_expect(!whole_.begins_one(position), false)) mask_.apply<score_tiles>(s, position + 4 * lane_.group);
    const float largest = lane_max(s);
    if (__builtin_expect(any_lane(Softmax::exceeds(softmax_, largest * scale_)), false)) {
      output_.scale(Softmax::raise_max(softmax_, largest, scale_, lane_));
    }
    typename Softmax::P p;
    Softmax::compute_p(s, scale_, softmax_, p);
    wave_lds_fence();
    multiply_values(p);
    wave_lds_fence();
  }

  static constexpr int reads = Softmax::products * Pv::reads;  // per column tile
  static constexpr int column_group = 8 / reads;               // column tiles that are read at once
  static constexpr int column_groups = Output::tiles / column_group;
  static constexpr int pair = column_group > 1 ? 2 : 1;

  MLA_DEVICE void read_values(int g, u32x2 (&values)[column_group][reads]) const {
#pragma unroll
    for (int c = 0; c < column_group; ++c)
#pragma unroll
      for (int n = 0; n < reads; ++n) values[c][n] = column_map_.read(latent_, g * column_group + c, n);
  }

  // O^T += V^T P^T. Each group of columns is read while the one before is multiplied.
  MLA_DEVICE void multiply_values(const typename Softmax::P& p) {
    u32x2 values[2][column_group][reads];
    read_values(0, values[0]);
#pragma unroll
    for (int g = 0; g < column_groups; ++g) {
      const u32x2(&now)[column_group][reads] = values[g % 2];
      if (g + 1 < column_groups) {
        read_values(g + 1, values[(g + 1) % 2]);
        wait_lgkmcnt<column_group * reads>();
      } else {
        wait_lgkmcnt<0>();
      }
      // Two column tiles alternate, so that no product follows one into the same accumulator.
#pragma unroll
      for (int c = 0; c < column_group; c += pair) {
        typename Pv::Columns columns[pair][Softmax::products];
        columns_of<Pv>(now, c, columns);
#pragma unroll
        for (int i = 0; i < pair * Softmax::products; ++i) {
          f32x4& sum = output_.tile[g * column_group + c + i % pair];
          sum = Pv::multiply(columns[i % pair][i / pair], p[i / pair], sum);
        }
      }
    }
  }

  const mla::WorkTile tile_;
  const mla::SequenceRows rows_;
  const int first_row_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;     // the workgroup's
  const uint32_t latent_;  // the wave's quarter
  const KeyReadMap<Tile> key_map_;
  const ColumnReadMap<Tile> column_map_;
  const float scale_;
  WholeTiles whole_;
  RowMask mask_;
  Query query_;
  Registers kv_;
  typename Softmax::Row softmax_;
  Output output_;
};

}  // namespace cdna::mfma_16x16x32
