// The mainloop for up to 16 rows: the four waves take every fourth 16-key tile of the work tile and never meet until it
// ends.
//
// Each wave does flash decoding of its own. It multiplies its keys from the registers they were loaded to (no LDS, no
// barrier), and stores the same registers into its private quarter of LDS, from which PV reads them back by column. The
// registers serve as a double buffer, so 18 KiB per wave stay in flight. The four results are combined when the tile
// ends.
#pragma once

#include "cdna/common/lds.hpp"
#include "cdna/common/score_scale.hpp"
#include "cdna/decode/accum_o.hpp"
#include "cdna/decode/mfma_16x16x16/lds_tile.hpp"
#include "cdna/decode/mfma_16x16x16/producer_registers.hpp"
#include "cdna/decode/mfma_16x16x16/products.hpp"
#include "cdna/decode/row_mask.hpp"
#include "cdna/decode/softmax.hpp"
#include "common/paged_kv.hpp"

namespace cdna::mfma_16x16x16 {

template <class Problem, class Policy, class Mma>
class KeySplitWave;

// LDS of a wave: its keys, later the part of its output, of two blocks of columns at most, that is combined at a time.
template <class Problem>
struct KeySplitLds {
  using Tile = LatentLdsTile<Problem::latent, Problem::Format::bytes>;
  using Output = AccumO<Problem::latent>;
  static constexpr int part_blocks = Output::tiles > BLOCK_TILES ? 2 : 1;
  static constexpr int part_bytes = part_blocks * BLOCK_TILES * WAVE * 16;
  static constexpr int wave_bytes = Tile::bytes > part_bytes ? Tile::bytes : part_bytes;
};

template <class Problem, class Policy, class Mma>
struct KeySplitMainloop {
  static constexpr int lds_bytes = Policy::waves * KeySplitLds<Problem>::wave_bytes;
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
  using Qk = typename Mma::Qk;
  using Pv = typename Mma::Pv;
  using Query = typename Qk::Query;
  using Softmax = TileSoftmax<Policy, Pv, 1>;
  static_assert(Problem::row_tiles == 1, "key-split decode: a wave holds the output of one 16-row tile");

  static constexpr int waves = Policy::waves;
  static constexpr int tile_keys = 16;
  static constexpr int pieces = KvRegisters<Problem>::loads;
  static constexpr int latent_pieces = Problem::latent * Problem::Format::bytes / 64;
  using Lds = KeySplitLds<Problem>;
  using Output = typename Lds::Output;

 public:
  MLA_DEVICE KeySplitWave(const mla::DecodeParams& p, const mla::WorkTile& tile, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds, int)
      : tile_(tile),
        rows_(rows),
        first_row_(first_row),
        lane_(Lane::current()),
        wave_(wave_id()),
        lds_(lds),
        latent_(lds + wave_ * Lds::wave_bytes),
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
    query_ = Query::load(p, rows_, first_row_, lane_);
    whole_ = WholeTiles::of<tile_keys>(p, rows_, tile_, first_row_);
    mask_ = RowMask::of(p, rows_, tile_, whole_.first, first_row_, lane_);

    Producer producer(paged_kv, tile_, lane_, kv_);
    int first = tile_.first_key + wave_ * tile_keys;
    producer.start(p, first);
    for (int left = (tiles - 1 - wave_) / waves; left > 0; --left) {
      producer.advance(first);
      const f32x4 s = scores<true>(producer);
      producer.refill_cos_sin(p);
      accumulate(s, first);
      first += Producer::step;
    }
    accumulate(scores<false>(producer), first);
  }

  MLA_DEVICE void finish() {}

  // The four waves' rows become one and are stored: row statistics first, then the outputs in parts of 256 columns, or
  // 128 if there are no more. Each wave adds up four of a part's tiles, as far as there are some.
  template <class Epilogue>
  MLA_DEVICE void store(const mla::DecodeParams& p) {
    constexpr int sums = waves * 16 * 4;
    const int mine = (wave_ * 16 + lane_.column) * 4;
    const float sum = sum_over_groups(softmax_.sum, lane_);
    mla::block_sync();
    if (lane_.group == 0) {
      lds_write_float(lds_ + mine, softmax_.max);
      lds_write_float(lds_ + sums + mine, sum);
    }
    mla::block_sync();
    float scale[waves];
    float max = mla::RowSoftmax::LOWEST;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      scale[w] = lds_read_float(lds_ + (w * 16 + lane_.column) * 4);
      max = __builtin_fmaxf(max, scale[w]);
    }
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      scale[w] = Policy::exp2(scale[w] - max);
      total += scale[w] * lds_read_float(lds_ + sums + (w * 16 + lane_.column) * 4);
    }
    const Epilogue target(p, tile_, rows_, first_row_ + lane_.column);
    const mla::RowResult<Policy> result = target.finish(max, total);
    if (wave_ == 0 && lane_.group == 0) target.store_lse(result.lse);
#pragma unroll
    for (int w = 0; w < waves; ++w) scale[w] = roundable(scale[w] * (result.scale * Epilogue::value_scale(p)));

    constexpr int part_tiles = Lds::part_blocks * BLOCK_TILES;
    constexpr int tile_bytes = WAVE * 16;
#pragma unroll
    for (int part = 0; part < Output::tiles / part_tiles; ++part) {
      mla::block_sync();
#pragma unroll
      for (int n = 0; n < part_tiles; ++n) {
        lds_write_f32x4(latent_ + n * tile_bytes + lane_.index * 16, output_.tile[part * part_tiles + n]);
      }
      mla::block_sync();
      if (part_tiles < 4 * waves && wave_ >= part_tiles / 4) continue;
      f32x4 combined[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        combined[n] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < waves; ++w) {
          const LdsBytes tile = lds_ + w * Lds::wave_bytes + (wave_ * 4 + n) * tile_bytes;
          combined[n] += scale[w] * lds_read_f32x4(tile + lane_.index * 16);
        }
      }
      const int column = (part * Lds::part_blocks + wave_ / 2) * BLOCK_COLUMNS + lane_.group * 32 + wave_ % 2 * 4;
      target.template store<4, 4>([&](int r, mla::Vec<float, 4>& values) {
#pragma unroll
        for (int n = 0; n < 4; ++n) values[n] = combined[n][r];
        return column + r * 8;
      });
    }
  }

 private:
  // S^T of the keys in registers. Their latent part goes to LDS for PV, and each register is refilled once it is free.
  template <bool prefetch, class Producer>
  MLA_DEVICE f32x4 scores(Producer& producer) {
    f32x4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < pieces; ++n) {
      if constexpr (Problem::rotate) {
        if (n == latent_pieces)
          kv_.cos_sin.template rotate<Policy, typename Problem::Element>(kv_.key[n], kv_.key[pieces - 1]);
      }
      if (n < latent_pieces) lds_write16(latent_ + key_map_.of(n), kv_.key[n]);
      sum = multiply_piece(kv_.key[n], n, sum);
      if (prefetch) producer.refill(n);
    }
    return sum;
  }

  MLA_DEVICE f32x4 multiply_piece(u32x4 piece, int m, f32x4 sum) const {
    typename Qk::Keys keys;
    keys.piece = piece;
    if constexpr (Qk::Keys::steps > 0) {
#pragma unroll
      for (int step = 0; step < Qk::Keys::steps; ++step) keys.step(step);
    }
#pragma unroll
    for (int n = 0; n < Qk::products; ++n) sum = Qk::multiply(keys, query_, m, n, sum);
    return sum;
  }

  // Softmax and PV of the tile that begins at key `first`.
  MLA_DEVICE void accumulate(f32x4 s, int first) {
    const int position = first - whole_.first;
    if (__builtin_expect(!whole_.begins_one(position), false))
      mask_.apply<1>(&s, position + 4 * lane_.rematerialized().group);
    f32x4 scores[1] = {s};
    const float largest = lane_max(scores);
    if (__builtin_expect(any_lane(Softmax::exceeds(softmax_, largest * scale_)), false)) {
      output_.scale(Softmax::raise_max(softmax_, largest, scale_, lane_.rematerialized()));
    }
    typename Softmax::P p;
    Softmax::compute_p(scores, scale_, softmax_, p);
    multiply_values(p[0]);
  }

  // O^T += V^T P^T.
  MLA_DEVICE void multiply_values(typename Pv::Rows p) {
    using Values = typename Pv::Values;
    using Unit = typename Pv::Unit;
    wave_lds_fence();
#pragma unroll
    for (int b = 0; b < Output::tiles / BLOCK_TILES; ++b) {
      Values keys[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) keys[j] = *reinterpret_cast<MLA_LDS Values*>(latent_ + column_map_.of(b, j));
#pragma unroll
      for (int u = 0; u < BLOCK_TILES / Unit::columns; ++u) {
        Unit unit;
#pragma unroll
        for (int step = 0; step < Unit::steps; ++step) unit.step(keys, u, step);
#pragma unroll
        for (int c = 0; c < Unit::columns; ++c) {
          f32x4& sum = output_.tile[b * BLOCK_TILES + u * Unit::columns + c];
          sum = Pv::multiply(unit.column[c], p, sum);
        }
      }
    }
    wave_lds_fence();
  }

  const mla::WorkTile tile_;
  const mla::SequenceRows rows_;
  const int first_row_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;     // the workgroup's
  const LdsBytes latent_;  // the wave's quarter
  const ChunkLdsMap<typename Lds::Tile> key_map_;
  const ColumnLdsMap<typename Lds::Tile> column_map_;
  const float scale_;
  WholeTiles whole_;
  RowMask mask_;
  Query query_;
  KvRegisters<Problem> kv_;
  typename Softmax::Row softmax_;
  Output output_;
};

}  // namespace cdna::mfma_16x16x16
