// The mainloop for 32 to 128 rows: the waves share tiles of keys in LDS and split the query rows, wave w taking the
// 16-row tiles w and w + 4. No softmax state crosses a wave; one barrier per tile publishes a landed stage and frees
// the one before it.
//
// Where keys or values change their type on the way, up to 64 rows are split in two ways: two waves over rows, two over
// the keys of a tile. Each conversion and each LDS read then serves two row tiles; the results are merged when the work
// tile ends.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/score_scale.hpp"
#include "cdna/decode/mfma_16x16x32/accum_o.hpp"
#include "cdna/decode/mfma_16x16x32/products.hpp"
#include "cdna/decode/row_mask.hpp"
#include "cdna/decode/softmax.hpp"
#include "cdna/decode/tile_copy.hpp"
#include "common/paged_kv.hpp"

namespace cdna::mfma_16x16x32 {

// How the waves share the row tiles of a workgroup and the keys of a tile.
template <class Problem, class Policy, class Mma>
struct RowPartition {
  static constexpr int key_groups = Mma::splits_keys && Problem::row_tiles <= Policy::waves ? 2 : 1;
  static constexpr int row_waves = Policy::waves / key_groups;
  static constexpr int max_tiles = (Problem::row_tiles + row_waves - 1) / row_waves;
  // Waves with `max_tiles`; the others have one less.
  static constexpr int full_waves = Problem::row_tiles - (max_tiles - 1) * row_waves;
};

// LDS of the merge of two key groups: the outputs of four waves, then row statistics [wave][row tile][max, sum][16
// rows].
template <class Problem, class Policy>
struct KeyGroupExchange {
  static constexpr int output_bytes = AccumO<Problem::latent>::tiles * WAVE * 16;
  static constexpr int statistics = Policy::waves * output_bytes;
  static constexpr int lds_bytes = statistics + Policy::waves * 256;
};

template <class Problem, class Policy, class Mma, int tiles>
class RowSplitWave;

template <class Problem, class Policy, class Mma>
struct RowSplitMainloop {
  using Partition = RowPartition<Problem, Policy, Mma>;
  static constexpr int lds_bytes = Partition::key_groups > 1 ? KeyGroupExchange<Problem, Policy>::lds_bytes : 0;
  static constexpr bool sync_after_tile = true;
  static constexpr bool scalar_partial_row = true;

  template <class Kernel>
  MLA_DEVICE static void run_waves(LdsBytes lds) {
    const int wave = wave_id();
    if (Partition::full_waves == Partition::row_waves || wave % Partition::row_waves < Partition::full_waves) {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, Mma, Partition::max_tiles>>(lds, wave);
    } else {
      Kernel::template run_wave<RowSplitWave<Problem, Policy, Mma, Partition::max_tiles - 1>>(lds, wave);
    }
  }
};

// One wave's part: `tiles` 16-row tiles against every key of a work tile. A wave without rows still copies its keys.
template <class Problem, class Policy, class Mma, int tiles>
class RowSplitWave {
  using Element = typename Problem::Element;
  using Qk = typename Mma::Qk;
  using Pv = typename Mma::SharedPv;
  using Query = typename Qk::Query;
  using Output = AccumO<Problem::latent>;
  using Partition = RowPartition<Problem, Policy, Mma>;
  static constexpr int shared_keys = Mma::shared_keys;
  using Tile = SwizzledLdsTile<Problem::Format::bytes, Problem::row_bytes, shared_keys>;
  static constexpr int key_groups = Partition::key_groups;
  static constexpr int row_waves = Partition::row_waves;
  static constexpr int tile_keys = shared_keys / key_groups;  // of a shared tile, that the wave multiplies
  static constexpr int score_tiles = tile_keys / 16;
  static constexpr int array = tiles > 0 ? tiles : 1;
  static constexpr int in_vgpr = 4;  // of the second row tile's accumulators, which make room for those of scores
  using Softmax = TileSoftmax<Policy, Pv, score_tiles>;
  static constexpr int products = Softmax::products;

 public:
  MLA_DEVICE RowSplitWave(const mla::DecodeParams& p, const mla::WorkTile& tile, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds, int wave)
      : tile_(tile),
        rows_(rows),
        lane_(Lane::current()),
        wave_(of_this_tile(wave)),
        lds_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds))),
        key_group_(wave_ / row_waves),
        key_map_(lane_),
        column_map_(lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
    key_map_.first += key_group_ * (tile_keys / 8 * Tile::group_bytes);
    key_map_.tail += key_group_ * (tile_keys * 64);
    column_map_.first += key_group_ * (tile_keys / 8 * Tile::group_bytes);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      first_row_[r] = first_row + 16 * (wave_ % row_waves + r * row_waves);
      softmax_[r].clear();
    }
  }

  // QK^T, softmax and PV over the keys of the work tile.
  template <class Producer>
  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    const int count = (tile_.end_key - tile_.first_key + shared_keys - 1) / shared_keys;
    if (count <= 0) {
      clear_output();
      return;
    }
    const mla::PagedKv paged_kv(p, Problem::Format::bytes, tile_.sequence);
    Producer producer(paged_kv, tile_, p.rope_cos_sin, count, lds_, lane_, wave_);
    if (tiles > 0) whole_ = WholeTiles::of<tile_keys>(p, rows_, tile_, first_row_[0]);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      query_[r] = Query::load(p, rows_, first_row_[r], lane_);
      mask_[r] = RowMask::of(p, rows_, tile_, whole_.first, first_row_[r], lane_);
    }
    clear_output();
    wait_all_loads();

    uint32_t filled = 0, used = 0;  // stages that the next tile is copied to and read from
    for (int n = 0; n < min(Producer::prefetch, count); ++n) {
      producer.copy(n, filled);
      filled = Producer::next_stage(filled);
    }
    int position = tile_.first_key + key_group_ * tile_keys - whole_.first;
    int n = 0;
    for (; Producer::in_parts && n + Producer::prefetch < count; ++n) {
      producer.wait(n, used);
      mla::block_sync();
      accumulate(lds_ + used, position, TileCopy<Producer>{producer, n + Producer::prefetch, filled});
      filled = Producer::next_stage(filled);
      used = Producer::next_stage(used);
      position += shared_keys;
      end_turn();
    }
    for (; n < count; ++n) {
      producer.wait(n, used);
      mla::block_sync();
      if (!Producer::in_parts && n + Producer::prefetch < count) producer.copy(n + Producer::prefetch, filled);
      filled = Producer::next_stage(filled);
      accumulate(lds_ + used, position, NoCopy());
      used = Producer::next_stage(used);
      position += shared_keys;
      end_turn();
    }
  }

  // Makes each row's sums one, and one of the key groups' results.
  MLA_DEVICE void finish() {
    const Lane lane = lane_.rematerialized();
#pragma unroll
    for (int r = 0; r < tiles; ++r) softmax_[r].join(lane);
    if constexpr (key_groups > 1) merge_key_groups(lane);
  }

  template <class Epilogue>
  MLA_DEVICE void store(const mla::DecodeParams& p) const {
    const Lane lane = lane_.rematerialized();
    const float value_scale = Epilogue::value_scale(p);
    const Epilogue target[2] = {Epilogue(p, tile_, rows_, first_row_[0] + lane.column),
                                Epilogue(p, tile_, rows_, first_row_[array - 1] + lane.column)};
    float scale[array], lse[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      const float sum = softmax_[r].sum;
      const mla::RowResult<Policy> result = target[r].finish(softmax_[r].max, sum);
      lse[r] = opaque(result.lse);
      scale[r] = opaque(Softmax::output_scale(result.scale, sum, softmax_[r].divisor()) * value_scale);
    }
    // A load from here on would wait for the stores before it.
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_groups > 1 && key_group_ != r) continue;
      if (lane.group == 0) target[r].store_lse(lse[r]);
      target[r].template store<4, Output::tiles>([&](int t, mla::Vec<float, 4>& values) {
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = output_[r].tile[t][e] * scale[r];
        return 16 * t + 4 * lane.group;
      });
    }
  }

 private:
  MLA_DEVICE void clear_output() {
#pragma unroll
    for (int r = 0; r < tiles; ++r) output_[r].clear();
  }

  // Each wave and the one `row_waves` apart hold the same rows of other keys. The wave of group r keeps row tile r and
  // gives the other away through LDS, which no stage needs any more.
  MLA_DEVICE void merge_key_groups(const Lane& lane) {
    static_assert(key_groups == 2 && tiles <= 2, "merging: one row tile for each group");
    static_assert(!Pv::normalizes_by_rounded_sum, "merging: one sum for each row");
    constexpr int output_bytes = KeyGroupExchange<Problem, Policy>::output_bytes;
    constexpr int statistics = KeyGroupExchange<Problem, Policy>::statistics;
    const uint32_t mine = lds_ + statistics + wave_ * 256 + lane.column * 4;
    const uint32_t other = lds_ + statistics + (wave_ ^ row_waves) * 256 + lane.column * 4;
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (lane.group == 0) {
        lds_write_float(lds_pointer(mine + r * 128), softmax_[r].max);
        lds_write_float(lds_pointer(mine + r * 128 + 64), softmax_[r].sum);
      }
      if (key_group_ != r) {
#pragma unroll
        for (int t = 0; t < Output::tiles; ++t) {
          pin(r, t);
          lds_write_f32x4(lds_pointer(lds_ + wave_ * output_bytes + t * (WAVE * 16) + lane.index * 16),
                          output_[r].tile[t]);
          if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);
        }
      }
    }
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_group_ != r) continue;
      const float other_max = lds_read_float(lds_pointer(other + r * 128));
      const float max = __builtin_fmaxf(softmax_[r].max, other_max);
      const float scale = Policy::exp2(softmax_[r].max - max);
      const float other_scale = Policy::exp2(other_max - max);
      softmax_[r].max = max;
      softmax_[r].sum = softmax_[r].sum * scale + lds_read_float(lds_pointer(other + r * 128 + 64)) * other_scale;
#pragma unroll
      for (int t = 0; t < Output::tiles; ++t) {
        const uint32_t at = lds_ + (wave_ ^ row_waves) * output_bytes + t * (WAVE * 16) + lane.index * 16;
        pin(r, t);
        output_[r].tile[t] = output_[r].tile[t] * scale + lds_read_f32x4(lds_pointer(at)) * other_scale;
        pin(r, t);
        if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);
      }
    }
  }

  MLA_DEVICE void pin(int r, int t) {
    if (r == 0 || t < Output::tiles - in_vgpr) pin_to_agpr(output_[r].tile[t]);
  }

  // QK^T, softmax and PV of the tile at `stage` in LDS whose first key has `position`, counted from whole_.first.
  template <class Copy>
  MLA_DEVICE void accumulate(uint32_t stage, int position, const Copy& copy) {
    if (tiles == 0) {
      copy.whole();
      return;
    }
    f32x4 s[array][score_tiles];
    scores(stage, s, copy);
    u32x2 values[column_group][reads];
    read_values(stage, 0, values);
    if (__builtin_expect(!whole_.begins_one(position), false)) {
      const int of_lane = position + 4 * lane_.rematerialized().group;
#pragma unroll
      for (int r = 0; r < tiles; ++r) mask_[r].template apply<score_tiles>(s[r], of_lane);
    }
    rescale(s);
    typename Softmax::P p[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) Softmax::compute_p(s[r], scale_, softmax_[r], p[r]);
    multiply_values(stage, values, p);
  }

  // A step of QK^T is one 128-byte block of 32 keys' rows, or their tails; keys are read a step ahead of the products.
  static constexpr int steps_of_rows = Tile::blocks + (Tile::has_tail ? 1 : 0);
  static constexpr int steps = steps_of_rows * (score_tiles / 2);
  MLA_DEVICE static constexpr bool is_tail(int step) { return Tile::has_tail && step % steps_of_rows == Tile::blocks; }
  MLA_DEVICE static constexpr int reads_of(int step) { return is_tail(step) ? 2 : 4; }

  // S^T = K Q^T.
  template <class Copy>
  MLA_DEVICE void scores(uint32_t stage, f32x4 (&s)[array][score_tiles], const Copy& copy) {
#pragma unroll
    for (int r = 0; r < tiles; ++r)
#pragma unroll
      for (int T = 0; T < score_tiles; ++T) s[r][T] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    u32x4 keys[2][2][2];  // [step][key tile][piece]
    read_keys(stage, 0, keys[0]);
    copy.begin();
    multiply_steps<0>(stage, keys, s, copy);
  }

  template <int step, class Copy>
  MLA_DEVICE void multiply_steps(uint32_t stage, u32x4 (&keys)[2][2][2], f32x4 (&s)[array][score_tiles],
                                 const Copy& copy) {
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
          for (int r = 0; r < tiles; ++r) s[r][T] = Qk::multiply_tail(left, query_[r], s[r][T]);
        } else {
          const auto left = Qk::keys(now[0], now[1]);
#pragma unroll
          for (int r = 0; r < tiles; ++r) s[r][T] = Qk::multiply(left, query_[r], n, s[r][T]);
        }
        const int place = 2 * step + half;
#pragma unroll
        for (int n = place * Copy::parts / (2 * steps); n < (place + 1) * Copy::parts / (2 * steps); ++n) copy.part(n);
      }
      multiply_steps<step + 1>(stage, keys, s, copy);
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

  // Raises the running max of rows that a score exceeds by more than the threshold of the lazy rescale.
  MLA_DEVICE void rescale(const f32x4 (&s)[array][score_tiles]) {
    bool exceeded = false;
    float largest[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      largest[r] = lane_max(s[r]);
      exceeded |= Softmax::exceeds(softmax_[r], largest[r] * scale_);
    }
    if (__builtin_expect(any_lane(exceeded), false)) {
#pragma unroll
      for (int r = 0; r < tiles; ++r) {
        const float alpha = Softmax::raise_max(softmax_[r], largest[r], scale_, lane_.rematerialized());
        if (r == 1) {
          output_[r].template scale<in_vgpr>(alpha);
        } else {
          output_[r].scale(alpha);
        }
      }
    }
  }

  static constexpr int reads = products * Pv::reads;  // per column tile
  static constexpr int column_group = 8 / reads;      // column tiles that are read at once
  static constexpr int column_groups = Output::tiles / column_group;
  static constexpr int pair = tiles == 1 && column_group > 1 ? 2 : 1;

  MLA_DEVICE void read_values(uint32_t stage, int g, u32x2 (&values)[column_group][reads]) const {
#pragma unroll
    for (int c = 0; c < column_group; ++c)
#pragma unroll
      for (int n = 0; n < reads; ++n) values[c][n] = column_map_.read(stage, g * column_group + c, n);
  }

  // O^T += V^T P^T. `values` holds, or will, the first group of columns; each group is read while the one before is
  // multiplied.
  MLA_DEVICE void multiply_values(uint32_t stage, u32x2 (&values)[column_group][reads],
                                  const typename Softmax::P (&p)[array]) {
    u32x2 next[column_group][reads];
#pragma unroll
    for (int g = 0; g < column_groups; ++g) {
      u32x2(&now)[column_group][reads] = g % 2 ? next : values;
      if (g + 1 < column_groups) {
        read_values(stage, g + 1, g % 2 ? values : next);
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
        for (int i = 0; i < pair * Softmax::products; ++i) {
#pragma unroll
          for (int r = 0; r < tiles; ++r) {
            const int column = g * column_group + c + i % pair;
            f32x4& sum = output_[r].tile[column];
            sum = Pv::multiply(columns[i % pair][i / pair], p[r][i / pair], sum);
            if (r == 1 && column >= Output::tiles - in_vgpr) pin_to_vgpr(sum);
          }
        }
      }
    }
  }

  // Returns the wave as a new value: with key groups, P in fp8 or rotated keys LLVM 22 would keep what follows from it
  // for the next work tiles, in more scalar registers than there are.
  MLA_DEVICE static int of_this_tile(int wave) {
    if constexpr (key_groups > 1 || Pv::normalizes_by_rounded_sum || Problem::rotate) asm volatile("" : "+s"(wave));
    return wave;
  }

  // This is a member because LLVM 22 compiles 32, 48, 80 and 96 rows otherwise with a function of the namespace.
  MLA_DEVICE static int min(int a, int b) { return a < b ? a : b; }

  const mla::WorkTile tile_;
  const mla::SequenceRows rows_;
  const Lane lane_;
  const int wave_;
  const uint32_t lds_;
  const int key_group_;
  KeyReadMap<Tile> key_map_;
  ColumnReadMap<Tile> column_map_;
  const float scale_;
  WholeTiles whole_ = {};
  int first_row_[array];
  RowMask mask_[array];
  typename Softmax::Row softmax_[array];
  Query query_[array];
  Output output_[array];
};

}  // namespace cdna::mfma_16x16x32
