// Attention of one query token's heads over selected tokens, in one launch: gather, dequantise, scores, softmax,
// values.
//
// Each selected token is dequantised once per workgroup, by the wave that loaded it, into a tile of bf16 rows in LDS.
// Scores are split over waves by rows and keys, values by columns: wave w owns columns 128 w + 0..127 of every row's
// output. So a wave reads a quarter of the values instead of all of them, and weights (128 bytes per 64 rows and key)
// travel through LDS instead. Both products are held transposed, so a weight is a right operand of the second product
// in the very lane number that computed it.
//
// All waves must subtract the same number in the exponent. A wave whose scores exceed its row's reference by more than
// 2^LAG raises a flag instead of writing weights; behind the tile's barrier all waves see it, agree on new references
// and rescale. One barrier per tile otherwise.
#pragma once

#include "cdna/accumulation.hpp"
#include "cdna/copy.hpp"
#include "cdna/kernel_params.hpp"
#include "cdna/sparse_gather.hpp"
#include "cdna/sparse_rows.hpp"
#include "cdna/sparse_shape.hpp"
#include "cdna/sparse_values.hpp"
#include "cdna/wide_matrix.hpp"
#include "cdna/work_list.hpp"

namespace cdna {

template <class Policy, class Record, class Shape>
class SparseDecode {
  static constexpr int waves = Shape::waves;
  static constexpr int keys = Shape::keys;
  static constexpr int row_tiles = Shape::row_tiles;
  static constexpr int wave_rows = Shape::wave_row_tiles;
  static constexpr int key_tiles = Shape::wave_key_tiles;
  static constexpr int chunks = Record::qk_dim / 32;
  static constexpr int key_steps = keys / 32;  // of the second product
  using Gather = SparseGather<Record, keys, waves>;
  using Tile = typename Gather::Tile;
  using Query = SparseQuery<Record::qk_dim>;
  using Values = SparseValues<Record, Shape, Tile>;
  using Matrix = Matrix16x16x32<mla::bf16>;

  static constexpr int weights_bytes = row_tiles * key_steps * 1024;
  static constexpr int row_bytes = row_tiles * 16 * 4;  // a float of every row
  static constexpr int weights = Shape::stages * Tile::bytes;
  static constexpr int places = weights + 2 * weights_bytes;
  static constexpr int maxima = places + waves * Gather::lds_bytes;     // [key group][row]
  static constexpr int sums = maxima + Shape::key_groups * row_bytes;   // [key group][row]
  static constexpr int factors = sums + Shape::key_groups * row_bytes;  // [row], of a rescale
  static constexpr int masks = factors + row_bytes;                     // [stage] a bit per key
  static constexpr int flags = masks + 16;                              // [2]
  static constexpr int pools = flags + 16;

 public:
  static constexpr int threads = waves * WAVE;
  static constexpr int lds_bytes = pools + SparseSelection::lds_bytes;

  MLA_DEVICE static void run(LdsBytes lds) {
    const int wave = wave_id();
    const int first_row = mla::block_id_y() * row_tiles * 16;
    for (WorkList<SparseQueryTokens> work(reread_params<mla::SparseDecodeParams>(), mla::block_id_x()); work.more();) {
      const mla::SparseDecodeParams& p = reread_params<mla::SparseDecodeParams>();
      const uint32_t base = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds));
      if (wave == 0) SparseSelection::tabulate(p, work.sequence(p), base + pools);
      mla::block_sync();
      const SparseSelection selection(base + pools);
      SparseDecode decode(p, work.take(p, [keys = selection.keys()](int) { return keys; }), first_row, base, wave);
      decode.attend(p, selection);
      decode.store(reread_params<mla::SparseDecodeParams>());
    }
  }

 private:
  MLA_DEVICE SparseDecode(const mla::SparseDecodeParams& p, const mla::WorkItem& item, int first_row, uint32_t lds,
                          int wave)
      : item_(item),
        first_row_(first_row),
        lds_(lds),
        wave_(wave),
        row_group_(wave / Shape::key_groups),
        key_group_(wave % Shape::key_groups),
        scale_(p.softmax_scale * mla::LOG2_E) {
    const Lane lane = Lane::current();
    const int key = 4 * lane.group + lane.column / 4;
    own_ = static_cast<uint32_t>(lane.index * 16);
    piece_ = static_cast<uint32_t>(Tile::slot_offset(lane.column, lane.group));
    column_ = static_cast<uint32_t>(Tile::slot_offset(key, lane.column % 4 / 2) + lane.column % 2 * 8) + wave * 2048;
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) softmax_[r] = mla::RowSoftmax::empty();
    const float zero = fresh_zero();
#pragma unroll
    for (int r = 0; r < row_tiles; ++r)
#pragma unroll
      for (int i = 0; i < Values::column_tiles; ++i) output_[r][i] = f32x4{zero, zero, zero, zero};
  }

  MLA_DEVICE void attend(const mla::SparseDecodeParams& p, const SparseSelection& selection) {
    const int count = (item_.end_key - item_.first_key + keys - 1) / keys;
    if (count <= 0) return;
    Gather gather(selection, item_, lds_ + places + wave_ * Gather::lds_bytes, wave_);
    gather.load(0);
#pragma unroll
    for (int r = 0; r < wave_rows; ++r)
      query_[r].load(p, item_.sequence, first_row_ + 16 * (row_group_ * wave_rows + r), Lane::current());
    wait_loads();  // else the loop would wait for the queries, and so for all loads in flight, in every turn
    spread_query();
    if (wave_ == 0 && own_ < 32) lds_write_word(lds_place(lds_ + flags + own_ / 4), 0);
    uint32_t stage = 0;     // of the tile whose scores come next
    uint32_t bits = masks;  // and which of its keys are there
    if (!Shape::own_keys) {
#pragma unroll
      for (int i = 0; i < Gather::pieces; ++i) gather.store(i, lds_);
      mark(gather, bits);
      if (count > 1) gather.load(1);
    }
    mla::block_sync();
    for (int n = 0; n < count; ++n) {
      float sum[wave_rows];
      const bool last = stage == (Shape::stages - 1) * Tile::bytes;
      const uint32_t next = last ? 0 : stage + Tile::bytes;
      const uint32_t next_bits = last ? masks : bits + 4;
      uint32_t valid;
      if (Shape::own_keys) {
#pragma unroll
        for (int i = 0; i < Gather::pieces; ++i) gather.store(i, lds_ + stage);
        valid = gather.valid();
        if (n + 1 < count) gather.load(n + 1);
        wave_lds_fence();
        weigh(n, lds_ + stage, valid, sum, [](int) {});
      } else {
        valid = lds_read_word(lds_place(lds_ + bits));
        // In the shadow of this tile's products the next one is dequantised, and the one after it begins to load.
        weigh(n, lds_ + stage, valid, sum, [&](int s) {
          if (s < Gather::pieces && n + 1 < count) gather.store(s, lds_ + next);
          if (s == load_step) load_after(gather, n + 1, count, next_bits);
        });
        if (load_step == steps) load_after(gather, n + 1, count, next_bits);
      }
      __builtin_amdgcn_sched_barrier(0);
      mla::block_sync();
      add_values(n, lds_ + stage, valid, sum);
      // The turn's counters come behind its last product: an operand of that may be overwritten first thing in the next.
      __builtin_amdgcn_sched_barrier(0);
      stage = next;
      bits = next_bits;
    }
  }

  // As much of the queries as output and scores leave room for goes to accumulation registers.
  MLA_DEVICE void spread_query() {
    constexpr int room = (256 - row_tiles * Values::column_tiles * 4 - wave_rows * key_tiles * 4) / 4 - 2;
#pragma unroll
    for (int n = 0; n < wave_rows * chunks; ++n) {
      if (n < room) {
        f32x4 bits = __builtin_bit_cast(f32x4, query_[n / chunks].chunk[n % chunks]);
        keep_accumulated(bits);
        query_[n / chunks].chunk[n % chunks] = __builtin_bit_cast(u32x4, bits);
      }
    }
  }

  // Tile n has been stored: the next one.
  MLA_DEVICE void load_after(Gather& gather, int n, int count, uint32_t bits) const {
    mark(gather, bits);
    if (n + 1 < count) gather.load(n + 1);
  }
  // Which of the wave's keys that were loaded last are there, for the waves that score them.
  MLA_DEVICE void mark(const Gather& gather, uint32_t at) const {
    if (own_ == 0)
      *reinterpret_cast<MLA_LDS uint8_t*>(lds_place(lds_ + at + wave_)) = static_cast<uint8_t>(gather.valid());
  }

  // S^T of the wave's rows and keys: element r of key tile T of a lane is key 16 T + 4 * lane.group + r of row
  // lane.column.
  static constexpr int step_chunks = row_tiles >= 6 ? 1 : 2;
  static constexpr int steps = chunks / step_chunks;
  static constexpr int step_reads = step_chunks * key_tiles;
  static constexpr int ahead = key_tiles == 1 && wave_rows < 3 ? 3 : 1;  // steps of keys read ahead of the products

  // The step beside which the next load begins: as soon as the loaded pieces are stored, or, where they are many
  // registers, behind the softmax.
  static constexpr int load_step = Record::raw_registers <= 32 ? Gather::pieces : steps;
  static_assert(Shape::own_keys || Gather::pieces <= steps, "sparse decode: a step for every piece of a tile");

  // `aside(s)` is done between the products of steps s and s + 1.
  template <class Aside>
  MLA_DEVICE void scores(uint32_t tile, f32x4 (&t)[wave_rows][key_tiles], const Aside& aside) const {
#pragma unroll
    for (int r = 0; r < wave_rows; ++r)
#pragma unroll
      for (int T = 0; T < key_tiles; ++T) t[r][T] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    const uint32_t at = tile + key_group_ * key_tiles * 2 * Tile::group_bytes + piece_;
    u32x4 read[ahead + 1][key_tiles][step_chunks];
#pragma unroll
    for (int s = 0; s < ahead; ++s) read_keys(at, s, read[s]);
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      if (s + ahead < steps) {
        read_keys(at, s + ahead, read[(s + ahead) % (ahead + 1)]);
        wait_lds<ahead * step_reads>();
      } else {
        wait_lds<0>();
      }
#pragma unroll
      for (int T = 0; T < key_tiles; ++T)
#pragma unroll
        for (int c = 0; c < step_chunks; ++c)
#pragma unroll
          for (int r = 0; r < wave_rows; ++r) {
            t[r][T] = Matrix::multiply(read[s % (ahead + 1)][T][c], query_[r].chunk[s * step_chunks + c], t[r][T]);
          }
      aside(s);
    }
  }
  MLA_DEVICE void read_keys(uint32_t at, int s, u32x4 (&read)[key_tiles][step_chunks]) const {
#pragma unroll
    for (int T = 0; T < key_tiles; ++T)
#pragma unroll
      for (int c = 0; c < step_chunks; ++c) {
        const int chunk = s * step_chunks + c;
        read[T][c] = lds_read16(lds_place((at ^ (chunk % 2 * 64)) + T * 2 * Tile::group_bytes + chunk / 2 * 1024));
      }
  }

  // Scores of keys that are not there become -inf. `valid` has a bit for each key of the tile, or of the wave.
  MLA_DEVICE void mask(uint32_t valid, f32x4 (&t)[wave_rows][key_tiles]) const {
    constexpr uint32_t all = Shape::own_keys ? 0xffffu : 0xffffffffu;
    if (__builtin_expect(static_cast<uint32_t>(uniform(static_cast<int>(valid))) == all, true)) return;
    const uint32_t mine = valid >> (Shape::own_keys ? 0 : key_group_ * key_tiles * 16) >> (4 * Lane::current().group);
#pragma unroll
    for (int r = 0; r < wave_rows; ++r)
#pragma unroll
      for (int T = 0; T < key_tiles; ++T)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = t[r][T][e];
          t[r][T][e] = (mine >> (16 * T + e) & 1) != 0 ? score : mla::MINUS_INFINITY;
        }
  }

  // Weights of tile n for all waves to read, or the flag that says why not.
  template <class Aside>
  MLA_DEVICE void weigh(int n, uint32_t tile, uint32_t valid, float (&sum)[wave_rows], const Aside& aside) const {
    f32x4 t[wave_rows][key_tiles];
    scores(tile, t, aside);
    mask(valid, t);
    bool exceeded = false;
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) exceeded |= softmax_[r].exceeded_by(largest(t[r]) * scale_);
    if (__builtin_expect(any_lane(exceeded), false)) {
      // Atomic, because several waves may say so.
      __hip_atomic_fetch_max(reinterpret_cast<MLA_LDS uint32_t*>(lds_place(lds_ + flags + n % 2 * 4)),
                             static_cast<uint32_t>(n + 1), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    } else {
      write_weights(n, t, sum);
    }
  }

  MLA_DEVICE static float largest(const f32x4 (&t)[key_tiles]) {
    float largest = t[0][0];
#pragma unroll
    for (int i = 1; i < 4 * key_tiles; ++i) {
      const float score = t[i / 4][i % 4];
      largest = __builtin_fmaxf(largest, score);
    }
    return largest;
  }

  MLA_DEVICE void write_weights(int n, const f32x4 (&t)[wave_rows][key_tiles], float (&sum)[wave_rows]) const {
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      uint32_t packed[key_tiles][2];
      sum[r] = 0.0f;
#pragma unroll
      for (int T = 0; T < key_tiles; ++T) {
        float p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = t[r][T][e];
          p[e] = Policy::exp2(__builtin_fmaf(score, scale_, -softmax_[r].max));
        }
        sum[r] += (p[0] + p[1]) + (p[2] + p[3]);
        packed[T][0] = Policy::template pack_weights<mla::bf16>(p[0], p[1]);
        packed[T][1] = Policy::template pack_weights<mla::bf16>(p[2], p[3]);
      }
      const int first = key_group_ * key_tiles;  // of the 16-key tiles of the tile
      const uint32_t at = lds_ + weights + n % 2 * weights_bytes +
                          ((row_group_ * wave_rows + r) * key_steps + first / 2) * 1024 + own_ + first % 2 * 8;
      if constexpr (key_tiles == 2) {
        lds_write16(lds_place(at), u32x4{packed[0][0], packed[0][1], packed[1][0], packed[1][1]});
      } else {
        lds_write8(lds_place(at), u32x2{packed[0][0], packed[0][1]});
      }
    }
  }

  // Some wave's scores of tile n exceeded a reference: new references for all, the same in all waves that share a row.
  // They are computed again: to keep scores until all waves have spoken would cost registers in every turn.
  MLA_DEVICE void raise(int n, uint32_t tile, uint32_t valid, float (&sum)[wave_rows]) {
    const Lane lane = Lane::current();
    f32x4 t[wave_rows][key_tiles];
    scores(tile, t, [](int) {});
    mask(valid, t);
    const uint32_t row = lds_ + maxima + (row_group_ * wave_rows * 16 + lane.column) * 4;
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      const float most = max_over_groups(largest(t[r]), lane) * scale_;
      if (lane.group == 0) lds_write_float(lds_place(row + key_group_ * row_bytes + r * 64), most);
    }
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      float max = softmax_[r].max;
#pragma unroll
      for (int k = 0; k < Shape::key_groups; ++k)
        max = __builtin_fmaxf(max, lds_read_float(lds_place(row + k * row_bytes + r * 64)));
      const float factor = Policy::exp2(softmax_[r].max - max);
      softmax_[r].max = max;
      softmax_[r].sum *= factor;
      if (key_group_ == 0 && lane.group == 0) lds_write_float(lds_place(row + (factors - maxima) + r * 64), factor);
    }
    write_weights(n, t, sum);
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) {
      Values::rescale(output_, r, lds_read_float(lds_place(lds_ + factors + (r * 16 + lane.column) * 4)));
    }
  }

  MLA_DEVICE void add_values(int n, uint32_t tile, uint32_t valid, float (&sum)[wave_rows]) {
    const uint32_t flag = lds_read_word(lds_place(lds_ + flags + n % 2 * 4));
    if (__builtin_expect(uniform(static_cast<int>(flag)) == n + 1, false)) raise(n, tile, valid, sum);
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) softmax_[r].sum += sum[r];
    Values::add(output_, lds_ + weights + n % 2 * weights_bytes + own_, tile, column_);
  }

  MLA_DEVICE void store(const mla::SparseDecodeParams& p) const {
    const Lane lane = Lane::current();
    const uint32_t row = lds_ + maxima + (row_group_ * wave_rows * 16 + lane.column) * 4;
#pragma unroll
    for (int r = 0; r < wave_rows; ++r) {
      const float sum = sum_over_groups(softmax_[r].sum, lane);
      if (lane.group == 0) {
        lds_write_float(lds_place(row + key_group_ * row_bytes + r * 64), softmax_[r].max);
        lds_write_float(lds_place(row + (sums - maxima) + key_group_ * row_bytes + r * 64), sum);
      }
    }
    mla::block_sync();
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) {
      const uint32_t at = lds_ + maxima + (16 * r + lane.column) * 4;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < Shape::key_groups; ++k)
        sum += lds_read_float(lds_place(at + (sums - maxima) + k * row_bytes));
      const SparseRow<Policy> to(p, item_, first_row_ + 16 * r + lane.column, lds_read_float(lds_place(at)), sum);
      if (wave_ == 0 && lane.group == 0) to.store_lse();
      to.template store<Values::column_tiles>(128 * wave_ + 4 * lane.group, [&](int i) { return output_[r][i]; });
    }
  }

  const mla::WorkItem item_;
  const int first_row_;
  const uint32_t lds_;
  const int wave_;
  const int row_group_;
  const int key_group_;
  const float scale_;
  uint32_t own_;     // 16 bytes for each lane
  uint32_t piece_;   // the lane's first place in a tile as left operand of the scores
  uint32_t column_;  // and of the values
  mla::RowSoftmax softmax_[wave_rows];
  Query query_[wave_rows];
  typename Values::Output output_;
};

}  // namespace cdna
