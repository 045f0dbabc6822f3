// The mainloop for 32 to 128 rows: the waves share 16-key stages in LDS and split the query rows, one or two 16-row
// tiles to a wave. No softmax state crosses a wave; one barrier per tile publishes a landed stage and frees the one
// before it.
//
// Up to 64 rows of an fp8 cache are split in two ways: two waves over rows, two over keys. A token then has half the
// bytes but as many LDS reads as before, which would be the bound; with two row tiles per wave each read serves twice
// the products. Two tiles are consumed at once, while the next two arrive in their stored form.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/score_scale.hpp"
#include "cdna/decode/mfma_16x16x16/kv_stage_tile.hpp"
#include "cdna/decode/mfma_16x16x16/merge_key_groups.hpp"
#include "cdna/decode/mfma_16x16x16/softmax.hpp"
#include "cdna/decode/query.hpp"
#include "cdna/decode/row_mask.hpp"
#include "cdna/decode/tile_copy.hpp"
#include "common/paged_kv.hpp"

namespace cdna::mfma_16x16x16 {

// How the waves share the row tiles: as many waves as needed get `max_tiles`, so that as few waves read the keys as the
// busiest one allows (three of four with 5 or 6 tiles: the fourth would save the others nothing).
template <class Problem, class Policy>
struct RowPartition {
  static constexpr int key_groups = Problem::Format::bytes == 1 && Problem::row_tiles <= Policy::waves ? 2 : 1;
  static constexpr int waves = Policy::waves / key_groups;  // of a key group
  static constexpr int max_tiles = (Problem::row_tiles + waves - 1) / waves;
  static constexpr int busy = (Problem::row_tiles + max_tiles - 1) / max_tiles;  // waves with tiles: w, w + busy
  // Waves with `max_tiles`; the other busy ones have one less.
  static constexpr int full = Problem::row_tiles - (max_tiles - 1) * busy;
  static_assert(key_groups == 1 || busy == waves, "row split: all waves take part in merging key groups");
};

template <class Problem, class Policy, int tiles>
class RowSplitWave;

template <class Problem, class Policy>
struct RowSplitMainloop {
  using Partition = RowPartition<Problem, Policy>;
  static constexpr int lds_bytes = Partition::key_groups > 1 ? KeyGroupExchange<Policy>::lds_bytes : 0;
  // Key groups begin a work tile with a barrier before anything shared is written.
  static constexpr bool sync_after_tile = Partition::key_groups == 1;
  static constexpr bool scalar_partial_row = false;

  template <class Kernel>
  MLA_DEVICE static void run_waves(LdsBytes lds) {
    const int wave = wave_id();
    const int in_group = wave % Partition::waves;
    if (in_group < Partition::full) {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, Partition::max_tiles>>(lds, wave);
    } else if (in_group < Partition::busy) {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, Partition::max_tiles - 1>>(lds, wave);
    } else {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, 0>>(lds, wave);
    }
  }
};

// One wave's part: `tiles` 16-row tiles against every key of a work tile. A wave without rows still copies its keys.
template <class Problem, class Policy, int tiles>
class RowSplitWave {
  using Element = typename Problem::Element;
  using Softmax = TileSoftmax<Policy, Element>;
  using Partition = RowPartition<Problem, Policy>;
  static constexpr int chunks = Problem::qk_dim / 32;
  static constexpr int tile_keys = STAGE_KEYS;
  using Output = AccumO<Problem::latent>;
  static constexpr int array = tiles > 0 ? tiles : 1;
  static constexpr int key_groups = Partition::key_groups;
  static constexpr int in_vgpr = 2;  // of the second tile's accumulators, which make room for two of scores

 public:
  MLA_DEVICE RowSplitWave(const mla::DecodeParams& p, const mla::WorkTile& tile, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds, int wave)
      : tile_(tile),
        rows_(rows),
        lane_(Lane::current()),
        wave_(wave),
        lds_(lds),
        key_group_(wave / Partition::waves),
        read_map_(lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      first_row_[r] = first_row + 16 * (wave % Partition::waves + r * Partition::busy);
      softmax_[r] = mla::RowSoftmax::empty();
      output_[r].clear();
    }
  }

  // QK^T, softmax and PV over the keys of the work tile.
  template <class Producer>
  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    const int count = (tile_.end_key - tile_.first_key + tile_keys - 1) / tile_keys;
    if (count <= 0) return;
    const mla::PagedKv paged_kv(p, Problem::Format::bytes, tile_.sequence);
    Producer producer(paged_kv, tile_, p.rope_cos_sin, count, lds_, lane_, wave_);
    if (tiles > 0) whole_ = WholeTiles::of<tile_keys>(p, rows_, tile_, first_row_[0]);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      const Lane lane = lane_.rematerialized();
      query_[r] = QueryTile<Problem>::load(p, rows_, first_row_[r], lane);
      if constexpr (Problem::Format::StoredQuery::bytes == 1)
        query_[r].pass_through_lds(lds_ + Producer::private_bytes_of(wave_), lane);
      mask_[r] = RowMask::of(p, rows_, tile_, whole_.first, first_row_[r], lane);
    }
    wait_all_loads();

    if constexpr (key_groups == 1) {
      process_stages(producer, count);
    } else {
      process_stage_pairs(producer, count);
    }
  }

  // Makes each row's sum one, and one of the key groups' results.
  MLA_DEVICE void finish() {
    const Lane lane = lane_.rematerialized();
#pragma unroll
    for (int r = 0; r < tiles; ++r) softmax_[r].sum = sum_over_groups(softmax_[r].sum, lane);
    if constexpr (key_groups > 1 && tiles > 0) {
      merge_key_groups<Policy, tiles>(lds_, wave_, key_group_, Partition::waves, lane, softmax_, output_);
    }
  }

  template <class Epilogue>
  MLA_DEVICE void store(const mla::DecodeParams& p) {
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_groups > 1 && key_group_ != r) continue;
      const Lane lane = lane_.rematerialized();
      const Epilogue target(p, tile_, rows_, first_row_[r] + lane.column);
      const mla::RowResult<Policy> result = target.finish(softmax_[r].max, softmax_[r].sum);
      if (lane.group == 0) target.store_lse(result.lse);
      const float scale = roundable(result.scale * Epilogue::value_scale(p));
      target.template store<BLOCK_TILES, Output::blocks * 4>([&](int i, mla::Vec<float, BLOCK_TILES>& values) {
        const int b = i / 4, e = i % 4;
        __builtin_amdgcn_sched_barrier(0);  // or all pieces are scaled before the first is stored
        if (e == 0) {
#pragma unroll
          for (int t = 0; t < BLOCK_TILES; ++t) pin_to_agpr(output_[r].tile[b][t]);
        }
#pragma unroll
        for (int t = 0; t < BLOCK_TILES; ++t) values[t] = output_[r].tile[b][t][e] * scale;
        return b * BLOCK_COLUMNS + lane.group * 32 + e * 8;
      });
    }
  }

 private:
  template <class Producer>
  MLA_DEVICE void process_stages(Producer& producer, int count) {
    int filled = 0, used = 0;  // stages that the next tile is copied to and read from
    for (int n = 0; n < min(Producer::prefetch, count); ++n) {
      producer.copy(n, filled);
      filled = Producer::next_stage(filled);
    }
    int position = tile_.first_key - whole_.first;
    int n = 0;
    for (; n + Producer::prefetch < count; ++n) {
      producer.wait(n, used);
      mla::block_sync();
      accumulate(lds_ + used, position, TileCopy{producer, n + Producer::prefetch, filled});
      filled = Producer::next_stage(filled);
      used = Producer::next_stage(used);
      position += tile_keys;
      end_turn();
    }
    for (; n < count; ++n) {
      producer.wait(n, used);
      mla::block_sync();
      accumulate(lds_ + used, position, NoCopy());
      used = Producer::next_stage(used);
      position += tile_keys;
    }
  }

  // Two tiles at a time, one for each key group. A wave converts only what it copied itself, so no wave waits for
  // another's copies, only for the stages to be free and then filled.
  template <class Producer>
  MLA_DEVICE void process_stage_pairs(Producer& producer, int count) {
    for (int n = 0; n < min(2, count); ++n) producer.copy(n, 0);
    int position = tile_.first_key + key_group_ * tile_keys - whole_.first;
    int n = 0;
    const auto convert = [&] {
      wait_vmcnt<0>();
      mla::block_sync();
      producer.convert(n, 0);
      if (n + 1 < count) producer.convert(n + 1, Producer::stage_bytes);
      mla::block_sync();
      return lds_ + key_group_ * Producer::stage_bytes;
    };
    for (; n + 3 < count; n += 2) {
      accumulate(convert(), position, TileCopy<Producer, int, 2>{producer, n + 2, 0});
      position += 2 * tile_keys;
      end_turn();
    }
    for (; n < count; n += 2) {
      const LdsBytes stage = convert();
      if (n + 2 < count) producer.copy(n + 2, 0);
      if (n + key_group_ < count) accumulate(stage, position, NoCopy());
      position += 2 * tile_keys;
    }
  }

  // QK^T, softmax and PV of the tile at `stage` in LDS whose first key has `position`, counted from whole_.first.
  // Another tile is copied meanwhile.
  template <class Copy>
  MLA_DEVICE void accumulate(LdsBytes stage, int position, const Copy& copy) {
    if (tiles == 0) {
      copy.whole();
      return;
    }
    f32x4 s[array];
    scores(stage, s, copy);
    u32x4 values[4];
    read_values(stage, 0, values);
    if (__builtin_expect(!whole_.begins_one(position), false)) {
      const int of_lane = position + 4 * lane_.rematerialized().group;
#pragma unroll
      for (int r = 0; r < tiles; ++r) mask_[r].template apply<1>(&s[r], of_lane);
    }
    rescale(s);
    u32x2 p[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) p[r] = Softmax::compute_p(s[r], scale_, softmax_[r]);
    multiply_values(stage, values, p);
  }

  // S^T = K Q^T. Keys are read a group ahead of the products that use them.
  template <class Copy>
  MLA_DEVICE void scores(LdsBytes stage, f32x4 (&s)[array], const Copy& copy) {
    constexpr int rope_chunks = Problem::rope / 32;
    constexpr int products = chunks + (Problem::rotate ? rope_chunks : 0);  // with the residuals of rotated rope parts
    constexpr int group = products % 3 == 0 ? 3 : products % 4 == 0 ? 4 : 5;
    static_assert(products % group == 0, "row split: whole groups of products");
    constexpr int groups = products / group;
#pragma unroll
    for (int r = 0; r < tiles; ++r) s[r] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    u32x4 keys[2][group];
    read_keys<group>(stage, 0, keys[0]);
    copy.begin();
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      if (g + 1 < groups) {
        read_keys<group>(stage, g + 1, keys[(g + 1) % 2]);
        wait_lgkmcnt<group>();
      } else {
        wait_lgkmcnt<0>();
      }
#pragma unroll
      for (int c = 0; c < group; ++c) {
#pragma unroll
        for (int r = 0; r < tiles; ++r) {
          const int n = g * group + c;
          s[r] = multiply_chunk<Element>(keys[g % 2][c], query_[r].chunk[n < chunks ? n : n - rope_chunks], s[r]);
        }
        copy.part(g * group + c);
      }
    }
  }

  template <int group>
  MLA_DEVICE void read_keys(LdsBytes stage, int g, u32x4 (&keys)[group]) const {
#pragma unroll
    for (int c = 0; c < group; ++c) keys[c] = lds_read16(stage + read_map_.of_chunk(g * group + c));
  }
  MLA_DEVICE void read_values(LdsBytes stage, int b, u32x4 (&values)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = lds_read16(stage + read_map_.of_columns(b, j));
  }

  // Raises the running max of rows that a score exceeds by more than the threshold of the lazy rescale.
  MLA_DEVICE void rescale(const f32x4 (&s)[array]) {
    bool exceeded = false;
    float lane_max[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      lane_max[r] = Softmax::lane_max(s[r]);
      exceeded |= softmax_[r].exceeded_by(lane_max[r] * scale_);
    }
    if (__builtin_expect(any_lane(exceeded), false)) {
#pragma unroll
      for (int r = 0; r < tiles; ++r) {
        const float alpha = Softmax::raise_max(softmax_[r], lane_max[r], scale_, lane_);
        if (r == 1) {
          output_[r].template scale<in_vgpr>(alpha);
        } else {
          output_[r].scale(alpha);
        }
      }
    }
  }

  // O^T += V^T P^T. `values` holds, or will, the first block of columns; each block is read while the one before is
  // multiplied.
  MLA_DEVICE void multiply_values(LdsBytes stage, u32x4 (&values)[4], const u32x2 (&p)[array]) {
    u32x4 next[4];
#pragma unroll
    for (int b = 0; b < Output::blocks; ++b) {
      u32x4(&now)[4] = b % 2 ? next : values;
      if (b + 1 < Output::blocks) {
        read_values(stage, b + 1, b % 2 ? values : next);
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
          first = Mfma16x16x16<Element>::multiply(columns.first, p[r], first);
          second = Mfma16x16x16<Element>::multiply(columns.second, p[r], second);
          if (r == 1 && b * BLOCK_TILES + 2 * d >= Output::blocks * BLOCK_TILES - in_vgpr) {
            pin_to_vgpr(first);
            pin_to_vgpr(second);
          }
        }
      }
    }
  }

  // This is a member because LLVM 22 compiles 32, 48, 80 and 96 rows otherwise with a function of the namespace.
  MLA_DEVICE static int min(int a, int b) { return a < b ? a : b; }

  const mla::WorkTile tile_;
  const mla::SequenceRows rows_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;
  const int key_group_;
  const KvStageReadMap<Problem> read_map_;
  const float scale_;
  WholeTiles whole_ = {};
  int first_row_[array];
  RowMask mask_[array];
  mla::RowSoftmax softmax_[array];
  QueryTile<Problem> query_[array];
  Output output_[array];
};

}  // namespace cdna::mfma_16x16x16
