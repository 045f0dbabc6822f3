// The mainloop of sparse decode: QK^T, online softmax and PV over the selected keys of one work tile.
//
// The producer leaves each selected token as a row of bf16 in LDS, once for the workgroup. QK^T is split over waves by
// rows and keys, PV by columns: wave w owns columns 128 w + 0..127 of every row's output. So a wave reads a quarter of
// the values instead of all of them, and P (128 bytes per 64 rows and key) travels through LDS instead. Both products
// are held transposed, so P is a right operand of PV in the very lane number that computed it.
//
// All waves must subtract the same running max. A wave whose scores exceed its row's max by more than the threshold of
// the lazy rescale raises a flag instead of writing P; behind the tile's barrier all waves see it, agree on a new max
// and rescale. There is one barrier per tile otherwise, or three where LDS has room for one stage of keys: then the
// next tile waits in registers, dequantised, until all waves have multiplied this one.
#pragma once

#include "cdna/common/accum_registers.hpp"
#include "cdna/common/lds_copy.hpp"
#include "cdna/common/score_scale.hpp"
#include "cdna/sparse_decode/query.hpp"
#include "cdna/sparse_decode/shared_storage.hpp"
#include "cdna/sparse_decode/topk_lists.hpp"
#include "common/online_softmax.hpp"
#include "common/work_tile.hpp"

namespace cdna::sparse {

template <class Problem, class Policy, class Partition, class Producer, class Pv>
class SparseMainloop {
  using KvFormat = typename Problem::KvFormat;
  static constexpr int keys = Partition::keys;
  static constexpr int row_tiles = Problem::row_tiles;
  static constexpr int wave_rows = Partition::wave_row_tiles;
  static constexpr int key_tiles = Partition::wave_key_tiles;
  static constexpr int chunks = KvFormat::qk_dim / 32;
  static constexpr int key_steps = keys / 32;  // of PV
  using Tile = typename Producer::Tile;
  using Query = SparseQueryTile<KvFormat::qk_dim>;
  using Mma = typename Pv::Mma;

 public:
  using Lds = SharedStorage<Problem, Partition, Producer>;

  MLA_DEVICE SparseMainloop(const mla::SparseDecodeParams& p, const mla::WorkTile& tile, int first_row, uint32_t lds,
                            int wave)
      : tile_(tile),
        first_row_(first_row),
        lds_(lds),
        wave_(wave),
        row_group_(Partition::row_group_of(wave)),
        key_group_(wave % Partition::key_groups),
        scale_(scale_of(p)) {
    const Lane lane = Lane::current();
    const int key = Pv::first_key(lane);
    own_ = static_cast<uint32_t>(lane.index * 16);
    piece_ = static_cast<uint32_t>(Tile::slot_offset(lane.column, lane.group));
    column_ = Pv::first_column(key, lane, wave);
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) softmax_[r] = mla::RowSoftmax::empty();
    Pv::clear(output_);
  }

  // QK^T, softmax and PV over the keys of the work tile.
  template <class>
  MLA_DEVICE void attend(const mla::SparseDecodeParams& p, const TopkLists& lists) {
    const int count = (tile_.end_key - tile_.first_key + keys - 1) / keys;
    if (count <= 0) return;
    Producer producer(lists, tile_, lds_ + Lds::row_addresses + wave_ * Producer::lds_bytes, wave_);
    producer.load(0);
#pragma unroll
    for (int r = 0; r < wave_rows; ++r)
      if (scores_keys())
        query_[r].load(p, tile_.sequence, first_row_ + 16 * (row_group_ * wave_rows + r), Lane::current());
    wait_all_loads();  // else the loop would wait for the queries, and so for all loads in flight, in every iteration
    spread_query();
    if (wave_ == 0 && own_ < 32) lds_write_word(lds_pointer(lds_ + Lds::flags + own_ / 4), 0);
    uint32_t stage = 0;          // of the tile whose scores come next
    uint32_t bits = Lds::masks;  // the mask of its valid keys
    if (!Partition::scores_own_keys) {
#pragma unroll
      for (int i = 0; i < Producer::pieces; ++i) producer.store(i, lds_);
      mark(producer.valid(), bits);
      if (count > 1) producer.load(1);
    }
    mla::block_sync();
    for (int n = 0; n < count; ++n) {
      float sum[wave_rows];
      const bool last = stage == (Partition::stages - 1) * Tile::bytes;
      const uint32_t next = last ? 0 : stage + Tile::bytes;
      const uint32_t next_bits = last ? Lds::masks : bits + 4;
      uint32_t valid, next_valid;
      if (Partition::scores_own_keys) {
#pragma unroll
        for (int i = 0; i < Producer::pieces; ++i) producer.store(i, lds_ + stage);
        valid = producer.valid();
        if (n + 1 < count) producer.load(n + 1);
        wave_lds_fence();
        compute_p(n, lds_ + stage, valid, sum, [](int) {});
      } else if (Partition::stages == 1) {
        valid = lds_read_word(lds_pointer(lds_ + bits));
        next_valid = producer.valid();
        convert_ahead(producer, n, count, valid, sum);
      } else {
        valid = lds_read_word(lds_pointer(lds_ + bits));
        // The next tile is dequantised in the shadow of this one's products, and the one after it begins to load.
        compute_p(n, lds_ + stage, valid, sum, [&](int step) {
          if (step < Producer::pieces && n + 1 < count) producer.store(step, lds_ + next);
          if (step == load_step) load_after(producer, n + 1, count, next_bits);
        });
        if (load_step == steps) load_after(producer, n + 1, count, next_bits);
      }
      __builtin_amdgcn_sched_barrier(0);
      mla::block_sync();
      multiply_values(n, lds_ + stage, valid, sum);
      // The next iteration's counters stay behind the last product, whose operands they could otherwise overwrite at
      // once.
      __builtin_amdgcn_sched_barrier(0);
      if (Partition::stages == 1 && n + 1 < count) {
        mla::block_sync();
        producer.write_converted(lds_);
        mark(next_valid, bits);
        if (!KvFormat::is_dequantised && n + 2 < count) producer.load(n + 2);
        mla::block_sync();
      }
      stage = next;
      bits = next_bits;
    }
  }

  template <class Epilogue>
  MLA_DEVICE void store(const mla::SparseDecodeParams& p) const {
    const Lane lane = Lane::current();
    const uint32_t row = lds_ + Lds::maxima + (row_group_ * wave_rows * 16 + lane.column) * 4;
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      const float sum = sum_over_groups(softmax_[r].sum, lane);
      if (lane.group == 0 && scores_keys()) {
        lds_write_float(lds_pointer(row + key_group_ * Lds::row_bytes + r * 64), softmax_[r].max);
        lds_write_float(lds_pointer(row + (Lds::sums - Lds::maxima) + key_group_ * Lds::row_bytes + r * 64), sum);
      }
    }
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) {
      const uint32_t at = lds_ + Lds::maxima + (16 * r + lane.column) * 4;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < Partition::key_groups; ++k)
        sum += lds_read_float(lds_pointer(at + (Lds::sums - Lds::maxima) + k * Lds::row_bytes));
      const Epilogue target(p, tile_, first_row_ + 16 * r + lane.column, lds_read_float(lds_pointer(at)), sum);
      if (wave_ == 0 && lane.group == 0) target.store_lse();
      Pv::store(target, 128 * wave_, lane, [&](int i) { return output_[r][i]; });
    }
  }

 private:
  // Only bare rows have descales, and queries in fp8 come with them alone.
  MLA_DEVICE static float scale_of(const mla::SparseDecodeParams& p) {
    if constexpr (KvFormat::descaled)
      return score_scale<KvFormat>(p);
    else
      return p.softmax_scale * mla::LOG2_E;
  }

  // Says whether there are scores for this wave to compute.
  MLA_DEVICE bool scores_keys() const {
    return Partition::scoring_waves == Partition::waves || wave_ < Partition::scoring_waves;
  }

  // Moves as much of the queries to AGPRs as output and scores leave room for.
  MLA_DEVICE void spread_query() {
    constexpr int room = (256 - row_tiles * Pv::column_tiles * 4 - wave_rows * key_tiles * 4) / 4 - 2;
#pragma unroll
    for (int n = 0; n < wave_rows * chunks; ++n) {
      if (n < room) {
        f32x4 bits = __builtin_bit_cast(f32x4, query_[n / chunks].chunk[n % chunks]);
        pin_to_agpr(bits);
        query_[n / chunks].chunk[n % chunks] = __builtin_bit_cast(u32x4, bits);
      }
    }
  }

  // Tile n is loaded and stored: publishes its valid keys and begins to load tile n + 1.
  MLA_DEVICE void load_after(Producer& producer, int n, int count, uint32_t bits) const {
    mark(producer.valid(), bits);
    if (n + 1 < count) producer.load(n + 1);
  }
  // Publishes which of the wave's keys of a tile are valid, for the waves that score them.
  MLA_DEVICE void mark(uint32_t valid, uint32_t at) const {
    if (own_ == 0) *reinterpret_cast<MLA_LDS uint8_t*>(lds_pointer(lds_ + at + wave_)) = static_cast<uint8_t>(valid);
  }

  // S^T of the wave's rows and keys: element e of key tile T of a lane is key 16 T + 4 * lane.group + e of row
  // lane.column.
  static constexpr int step_chunks = row_tiles >= 6 ? 1 : 2;
  static constexpr int steps = chunks / step_chunks;
  static constexpr int step_reads = step_chunks * key_tiles;
  static constexpr int read_ahead = key_tiles == 1 && wave_rows < 3 ? 3 : 1;  // steps of keys, ahead of the products

  // The step beside which the next load begins: as soon as the loaded pieces are stored or, where they take many
  // registers, behind the softmax.
  static constexpr int load_step = KvFormat::raw_registers <= 32 ? Producer::pieces : steps;
  static_assert(Partition::scores_own_keys || Producer::pieces <= steps, "sparse decode: a step for every piece");

  // Calls `aside(step)` between the products of a step and the next.
  template <class Aside>
  MLA_DEVICE void scores(uint32_t tile, f32x4 (&s)[wave_rows][key_tiles], const Aside& aside) const {
#pragma unroll
    for (int r = 0; r < wave_rows; ++r)
#pragma unroll
      for (int T = 0; T < key_tiles; ++T) s[r][T] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    const uint32_t at = tile + key_group_ * key_tiles * 2 * Tile::group_bytes + piece_;
    u32x4 read[read_ahead + 1][key_tiles][step_chunks];
#pragma unroll
    for (int step = 0; step < read_ahead; ++step) read_keys(at, step, read[step]);
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (step + read_ahead < steps) {
        read_keys(at, step + read_ahead, read[(step + read_ahead) % (read_ahead + 1)]);
        wait_lgkmcnt<read_ahead * step_reads>();
      } else {
        wait_lgkmcnt<0>();
      }
#pragma unroll
      for (int T = 0; T < key_tiles; ++T)
#pragma unroll
        for (int c = 0; c < step_chunks; ++c)
#pragma unroll
          for (int r = 0; r < wave_rows; ++r) {
            s[r][T] =
                Mma::multiply(read[step % (read_ahead + 1)][T][c], query_[r].chunk[step * step_chunks + c], s[r][T]);
          }
      aside(step);
    }
  }
  MLA_DEVICE void read_keys(uint32_t at, int step, u32x4 (&read)[key_tiles][step_chunks]) const {
#pragma unroll
    for (int T = 0; T < key_tiles; ++T)
#pragma unroll
      for (int c = 0; c < step_chunks; ++c) {
        const int chunk = step * step_chunks + c;
        read[T][c] = lds_read16(lds_pointer((at ^ (chunk % 2 * 64)) + T * 2 * Tile::group_bytes + chunk / 2 * 1024));
      }
  }

  // Scores of invalid keys become -inf. `valid` has a bit for each key of the tile, or of the wave.
  MLA_DEVICE void mask(uint32_t valid, f32x4 (&s)[wave_rows][key_tiles]) const {
    constexpr uint32_t all = Partition::scores_own_keys ? 0xffffu : 0xffffffffu;
    if (__builtin_expect(static_cast<uint32_t>(uniform(static_cast<int>(valid))) == all, true)) return;
    const uint32_t of_wave = valid >> (Partition::scores_own_keys ? 0 : key_group_ * key_tiles * 16);
    const uint32_t mine = of_wave >> (4 * Lane::current().group);
#pragma unroll
    for (int r = 0; r < wave_rows; ++r)
#pragma unroll
      for (int T = 0; T < key_tiles; ++T)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = s[r][T][e];
          s[r][T][e] = (mine >> (16 * T + e) & 1) != 0 ? score : mla::MINUS_INFINITY;
        }
  }

  // With one stage: publishes P of tile n while tile n + 1 is dequantised in registers, until the stage is free for it.
  // Then tile n + 2 begins to load, unless the registers that it needs hold tile n + 1 as it was loaded. Behind the
  // last tile there is nothing to dequantise; it is done again, because a branch in each step would part it from the
  // products.
  MLA_DEVICE void convert_ahead(Producer& producer, int n, int count, uint32_t valid, float (&sum)[wave_rows]) {
    const auto aside = [&](int step) {
      if (step < Producer::pieces) producer.convert(step);
      if (step == load_step && KvFormat::is_dequantised && n + 2 < count) producer.load(n + 2);
    };
    if (scores_keys()) {
      compute_p(n, lds_, valid, sum, aside);
      return;
    }
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) sum[r] = 0.0f;
#pragma unroll
    for (int step = 0; step < steps; ++step) aside(step);
  }

  // Publishes P of tile n for all waves, or the flag that says that a running max must be raised first.
  template <class Aside>
  MLA_DEVICE void compute_p(int n, uint32_t tile, uint32_t valid, float (&sum)[wave_rows], const Aside& aside) const {
    f32x4 s[wave_rows][key_tiles];
    scores(tile, s, aside);
    mask(valid, s);
    bool exceeded = false;
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) exceeded |= softmax_[r].exceeded_by(lane_max(s[r]) * scale_);
    if (__builtin_expect(any_lane(exceeded), false)) {
      // Atomic, because several waves may raise it.
      __hip_atomic_fetch_max(reinterpret_cast<MLA_LDS uint32_t*>(lds_pointer(lds_ + Lds::flags + n % 2 * 4)),
                             static_cast<uint32_t>(n + 1), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    } else {
      publish_p(n, s, sum);
    }
  }

  MLA_DEVICE void publish_p(int n, const f32x4 (&s)[wave_rows][key_tiles], float (&sum)[wave_rows]) const {
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      uint32_t packed[key_tiles][2];
      sum[r] = 0.0f;
#pragma unroll
      for (int T = 0; T < key_tiles; ++T) {
        float p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = s[r][T][e];
          p[e] = Policy::exp2(__builtin_fmaf(score, scale_, -softmax_[r].max));
        }
        sum[r] += (p[0] + p[1]) + (p[2] + p[3]);
        packed[T][0] = Policy::template pack_p<mla::bf16>(p[0], p[1]);
        packed[T][1] = Policy::template pack_p<mla::bf16>(p[2], p[3]);
      }
      const int first = key_group_ * key_tiles;  // the wave's first 16-key tile
      const uint32_t at = lds_ + Lds::p + n % 2 * Lds::p_bytes +
                          ((row_group_ * wave_rows + r) * key_steps + first / 2) * 1024 + own_ + first % 2 * 8;
      if constexpr (key_tiles == 2) {
        lds_write16(lds_pointer(at), u32x4{packed[0][0], packed[0][1], packed[1][0], packed[1][1]});
      } else {
        lds_write8(lds_pointer(at), u32x2{packed[0][0], packed[0][1]});
      }
    }
  }

  // Some wave's scores of tile n exceed a running max: raises it, to the same number in all waves that share a row. The
  // scores are computed again, because keeping them until all waves have reported would cost registers in every
  // iteration.
  MLA_DEVICE void raise_max(int n, uint32_t tile, uint32_t valid, float (&sum)[wave_rows]) {
    const Lane lane = Lane::current();
    f32x4 s[wave_rows][key_tiles];
    if (scores_keys()) {
      scores(tile, s, [](int) {});
      mask(valid, s);
    }
    const uint32_t row = lds_ + Lds::maxima + (row_group_ * wave_rows * 16 + lane.column) * 4;
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      const float max = max_over_groups(lane_max(s[r]), lane) * scale_;
      if (lane.group == 0 && scores_keys())
        lds_write_float(lds_pointer(row + key_group_ * Lds::row_bytes + r * 64), max);
    }
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      float max = softmax_[r].max;
#pragma unroll
      for (int k = 0; k < Partition::key_groups; ++k)
        max = __builtin_fmaxf(max, lds_read_float(lds_pointer(row + k * Lds::row_bytes + r * 64)));
      const float alpha = Policy::exp2(softmax_[r].max - max);
      softmax_[r].max = max;
      softmax_[r].sum *= alpha;
      if (key_group_ == 0 && lane.group == 0 && scores_keys())
        lds_write_float(lds_pointer(row + (Lds::alphas - Lds::maxima) + r * 64), alpha);
    }
    if (scores_keys()) publish_p(n, s, sum);
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) {
      Pv::rescale(output_, r, lds_read_float(lds_pointer(lds_ + Lds::alphas + (r * 16 + lane.column) * 4)));
    }
  }

  // PV of tile n, after a raise of the running max where some wave asked for it.
  MLA_DEVICE void multiply_values(int n, uint32_t tile, uint32_t valid, float (&sum)[wave_rows]) {
    const uint32_t flag = lds_read_word(lds_pointer(lds_ + Lds::flags + n % 2 * 4));
    if (__builtin_expect(uniform(static_cast<int>(flag)) == n + 1, false)) raise_max(n, tile, valid, sum);
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) softmax_[r].sum += sum[r];
    Pv::multiply(output_, lds_ + Lds::p + n % 2 * Lds::p_bytes + own_, tile, column_);
  }

  const mla::WorkTile tile_;
  const int first_row_;
  const uint32_t lds_;
  const int wave_;
  const int row_group_;
  const int key_group_;
  const float scale_;
  uint32_t own_;     // the lane's offset in arrays of 16 bytes per lane
  uint32_t piece_;   // the lane's first offset in a tile as the left operand of QK^T
  uint32_t column_;  // the same of PV
  mla::RowSoftmax softmax_[wave_rows];
  Query query_[wave_rows];
  typename Pv::Output output_;
};

}  // namespace cdna::sparse
