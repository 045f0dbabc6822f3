// Decode of up to 16 rows: four waves take every fourth 16-key tile of the item and never meet until it ends.
//
// A wave loads its keys from memory straight into matrix operands (no LDS, no barrier), multiplies them, and stores the
// same registers into its private quarter of LDS, from which it reads them back by column for the second product. As
// soon as a register is free the next tile's load is issued into it, so 18 KiB per wave stay in flight.
#pragma once

#include "cdna/decode/mfma_16x16x16/softmax.hpp"
#include "cdna/common/kernel_params.hpp"
#include "cdna/common/lds.hpp"
#include "cdna/decode/query.hpp"
#include "cdna/common/rope.hpp"
#include "cdna/common/tile_scheduler.hpp"
#include "common/epilogue.hpp"
#include "common/kv_source.hpp"

namespace cdna {

template <class Policy, class Problem>
class KeySplitDecode {
  using Element = typename Problem::Element;
  using Softmax = Weights<Policy, Element>;
  static_assert(Problem::row_tiles == 1, "key-split decode: a wave holds the output of one 16-row tile");

  static constexpr int waves = Policy::waves;
  static constexpr int tile_keys = 16;
  static constexpr int chunks = Problem::qk_dim / 32;
  static constexpr int latent_chunks = mla::LATENT / 32;
  static constexpr int pieces = Problem::row_bytes / 64;  // 16-byte loads of a lane per tile
  static constexpr int together = chunks / pieces;        // chunks in a piece: 1, or 2 where the cache is fp8
  using Query = QueryTile<Problem, 8 * together>;
  using Places = typename ChunkLdsMapFor<together>::Places;

 public:
  static constexpr int threads = waves * WAVE;
  static constexpr int lds_bytes = waves * LatentLdsTile::bytes;

  MLA_DEVICE static void run(LdsBytes lds) {
    const int first_row = mla::block_id_y() * Problem::rows;
    for (TileScheduler<DecodeSequences> scheduler(reread_params<mla::DecodeParams>(), mla::block_id_x()); scheduler.has_next();) {
      const mla::DecodeParams& p = reread_params<mla::DecodeParams>();
      mla::WorkItem item = scheduler.fetch_next(p, [&](int b) { return p.seq_lens[b]; });
      const mla::SequenceRows rows = mla::SequenceRows::of(p, item.sequence);
      if (first_row >= rows.rows) item.end_key = item.first_key;  // no query row: nothing to read
      KeySplitDecode decode(p, item, rows, first_row, lds);
      decode.attend(p);
      decode.merge_and_store(reread_params<mla::DecodeParams>());
    }
  }

 private:
  struct Keys {
    u32x4 piece[pieces];  // bytes 64 n + 16 * lane.group + 0..15 of the row of key lane.column
  };

  MLA_DEVICE KeySplitDecode(const mla::DecodeParams& p, const mla::WorkItem& item, const mla::SequenceRows& rows,
                            int first_row, LdsBytes lds)
      : item_(item),
        rows_(rows),
        first_row_(first_row),
        lane_(Lane::current()),
        wave_(wave_id()),
        lds_(lds),
        latent_(lds + wave_ * LatentLdsTile::bytes),
        key_places_(lane_),
        column_places_(lane_),
        scale_(score_scale<typename Problem::Format>(p)),
        softmax_(mla::RowSoftmax::empty()) {}

  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    output_.clear();
    const int tiles = (item_.end_key - item_.first_key + tile_keys - 1) / tile_keys;
    if (wave_ >= tiles) return;
    const mla::KvSource source(p, Problem::Format::bytes, item_.sequence);
    query_ = Query::load(p, rows_, first_row_, lane_);
    visible_ = min(item_.end_key, visible_keys(p, rows_, first_row_, lane_));
    visible_to_all_ =
        min(item_.end_key, uniform(rows_.visible_keys(p, mla::SequenceRows::token_of(p, first_row_))));

    int first = item_.first_key + wave_ * tile_keys;
    uint32_t key = key_at(first);
    load_keys(row_of(source, source.page_of(key), key));
    load_cos_sin(p, key);
    key = key_at(first + step);
    uint32_t page = source.page_of(key);
    for (int left = (tiles - 1 - wave_) / waves; left > 0; --left) {
      const char* next = row_of(source, page, key);
      const uint32_t next_key = key;
      key = key_at(first + 2 * step);
      page = source.page_of(key);
      const f32x4 t = scores<true>(next);
      load_cos_sin(p, next_key);
      accumulate(t, first);
      first += step;
    }
    accumulate(scores<false>(nullptr), first);
  }

  // The lane's key of the tile that begins at `first`; past the item's end its last key, masked later.
  MLA_DEVICE uint32_t key_at(int first) const {
    const int key = first + lane_.column;
    return static_cast<uint32_t>(key < item_.end_key ? key : item_.end_key - 1);
  }
  MLA_DEVICE const char* row_of(const mla::KvSource& source, uint32_t page, uint32_t key) const {
    return source.row(page, key) + lane_.group * 16;
  }

  MLA_DEVICE void load_keys(const char* row) {
#pragma unroll
    for (int n = 0; n < pieces; ++n) keys_.piece[n] = *reinterpret_cast<const u32x4*>(row + n * 64);
  }

  MLA_DEVICE void load_cos_sin(const mla::DecodeParams& p, uint32_t key) {
    if constexpr (Problem::rotate) {
      cos_sin_ = ChunkRope::load(p.rope_cos_sin + static_cast<int64_t>(key) * COS_SIN_FLOATS + lane_.group * 8);
    }
  }

  // S^T of the keys in registers, which go to LDS for the second product and make room for those at `next`.
  template <bool prefetch>
  MLA_DEVICE f32x4 scores(const char* next) {
    f32x4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < pieces; ++n) {
      if constexpr (Problem::rotate) {
        if (n == latent_chunks) {
          u32x4 residual[2];
          cos_sin_.template rotate<Policy, Element>(keys_.piece[n], keys_.piece[pieces - 1], residual);
          sum = multiply_chunk<Element>(residual[0], query_.chunk[n], sum);
          sum = multiply_chunk<Element>(residual[1], query_.chunk[pieces - 1], sum);
        }
      }
#pragma unroll
      for (int part = 0; part < together; ++part) {
        const int c = n * together + part;
        const u32x4 keys = chunk_of(keys_.piece[n], part);
        if (c < latent_chunks) lds_write16(latent_ + key_places_.of(c), keys);
        sum = multiply_chunk<Element>(keys, query_.chunk[c], sum);
      }
      if (prefetch) keys_.piece[n] = *reinterpret_cast<const u32x4*>(next + n * 64);
    }
    return sum;
  }

  MLA_DEVICE static u32x4 chunk_of(u32x4 piece, int part) {
    if constexpr (together == 1) {
      return piece;
    } else {
      return fp8_to_bf16(part == 0 ? piece.xy : piece.zw);
    }
  }

  // Softmax of the tile that begins at key `first`, and its values added to the output.
  MLA_DEVICE void accumulate(f32x4 t, int first) {
    if (__builtin_expect(first + tile_keys > visible_to_all_, false)) t = Softmax::mask(t, first, visible_, lane_);
    const float largest = Softmax::largest(t);
    if (__builtin_expect(any_lane(softmax_.exceeded_by(largest * scale_)), false)) {
      output_.scale(Softmax::raise_max(softmax_, largest, scale_, lane_));
    }
    add_values(Softmax::weights(t, scale_, softmax_));
  }

  MLA_DEVICE void add_values(u32x2 weights) {
    wave_lds_fence();
#pragma unroll
    for (int b = 0; b < OUTPUT_BLOCKS; ++b) {
      u32x4 keys[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) keys[j] = lds_read16(latent_ + column_places_.of(b, j));
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const KeyColumns columns = transpose_pair(keys[0][d], keys[1][d], keys[2][d], keys[3][d]);
        f32x4& first = output_.tile[b][2 * d];
        f32x4& second = output_.tile[b][2 * d + 1];
        first = Mfma16x16x16<Element>::multiply(columns.first, weights, first);
        second = Mfma16x16x16<Element>::multiply(columns.second, weights, second);
      }
    }
    wave_lds_fence();
  }

  // The four waves' rows become one: statistics first, then the outputs in two halves of 256 columns, each wave adding
  // up a quarter of a half.
  MLA_DEVICE void merge_and_store(const mla::DecodeParams& p) {
    constexpr int sums = waves * 16 * 4;
    const int mine = (wave_ * 16 + lane_.column) * 4;
    const float sum = sum_over_groups(softmax_.sum, lane_);
    mla::block_sync();
    if (lane_.group == 0) {
      lds_write_float(lds_ + mine, softmax_.max);
      lds_write_float(lds_ + sums + mine, sum);
    }
    mla::block_sync();
    float weight[waves];
    float max = mla::RowSoftmax::NOTHING;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      weight[w] = lds_read_float(lds_ + (w * 16 + lane_.column) * 4);
      max = __builtin_fmaxf(max, weight[w]);
    }
#pragma unroll
    for (int w = 0; w < waves; ++w) {
      weight[w] = Policy::exp2(weight[w] - max);
      total += weight[w] * lds_read_float(lds_ + sums + (w * 16 + lane_.column) * 4);
    }
    const mla::RowSink<Policy, Element> sink(p, item_, rows_, first_row_ + lane_.column);
    const mla::RowResult<Policy> result = sink.finish(max, total);
    if (wave_ == 0 && lane_.group == 0) sink.store_lse(result.lse);
#pragma unroll
    for (int w = 0; w < waves; ++w)
      weight[w] = roundable(weight[w] * (result.weight * value_scale<typename Problem::Format>(p)));

    constexpr int half_tiles = OUTPUT_BLOCKS / 2 * BLOCK_TILES;
    constexpr int tile_bytes = WAVE * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mla::block_sync();
#pragma unroll
      for (int n = 0; n < half_tiles; ++n) {
        lds_write_f32x4(latent_ + n * tile_bytes + lane_.index * 16,
                        output_.tile[half * 2 + n / BLOCK_TILES][n % BLOCK_TILES]);
      }
      mla::block_sync();
      f32x4 merged[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        merged[n] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < waves; ++w) {
          const LdsBytes tile = lds_ + w * LatentLdsTile::bytes + (wave_ * 4 + n) * tile_bytes;
          merged[n] += weight[w] * lds_read_f32x4(tile + lane_.index * 16);
        }
      }
      const int column = (half * 2 + wave_ / 2) * BLOCK_COLUMNS + lane_.group * 32 + wave_ % 2 * 4;
      sink.template store<4, 4>([&](int r, mla::Vec<float, 4>& values) {
#pragma unroll
        for (int n = 0; n < 4; ++n) values[n] = merged[n][r];
        return column + r * 8;
      });
    }
    mla::block_sync();
  }

  MLA_DEVICE static int min(int a, int b) { return a < b ? a : b; }

  static constexpr int step = waves * tile_keys;

  const mla::WorkItem item_;
  const mla::SequenceRows rows_;
  const int first_row_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;     // the workgroup's
  const LdsBytes latent_;  // the wave's quarter
  const Places key_places_;
  const ColumnLdsMap column_places_;
  const float scale_;
  int visible_;         // to the lane's row
  int visible_to_all_;  // rows of the tile
  Query query_;
  Keys keys_;
  ChunkRope cos_sin_;  // of the rope part of keys_
  mla::RowSoftmax softmax_;
  AccumO output_;
};

}  // namespace cdna
