// One kernel per building block of csrc/cdna: each exposes what the block does to one wave, or to one workgroup.
#include "cdna/common/convert.hpp"
#include "cdna/common/mfma_16x16x16.hpp"
#include "cdna/common/rope.hpp"
#include "cdna/decode/mfma_16x16x16/lds_tile.hpp"
#include "cdna/decode/mfma_16x16x16/merge_key_groups.hpp"
#include "cdna/decode/mfma_16x16x16/producer_kv_stage.hpp"
#include "cdna/decode/mfma_16x16x16/products.hpp"
#include "cdna/decode/row_mask.hpp"
#include "cdna/decode/softmax.hpp"
#include "gfx942/policy.hpp"

using namespace cdna;
using namespace cdna::mfma_16x16x16;
using Policy = gfx942::Policy;

struct Arrays {
  const void* in;
  const void* in2;
  void* out;
  void* out2;
};

// out[16][16] = in[16][16] * in2[16][16], by the lane map that mfma_16x16x16.hpp documents.
template <class Element>
MLA_DEVICE void matrix(const Arrays& p) {
  const Lane lane = Lane::current();
  const uint16_t* a = static_cast<const uint16_t*>(p.in);
  const uint16_t* b = static_cast<const uint16_t*>(p.in2);
  uint32_t left[4], right[4];
  for (int k = 0; k < 4; ++k) {
    left[k] = a[lane.column * 16 + 4 * lane.group + k];
    right[k] = b[(4 * lane.group + k) * 16 + lane.column];
  }
  const f32x4 d = Mfma16x16x16<Element>::multiply(u32x2{left[0] | left[1] << 16, left[2] | left[3] << 16},
                                                    u32x2{right[0] | right[1] << 16, right[2] | right[3] << 16},
                                                    f32x4{0.0f, 0.0f, 0.0f, 0.0f});
  for (int r = 0; r < 4; ++r) static_cast<float*>(p.out)[(4 * lane.group + r) * 16 + lane.column] = d[r];
}
MLA_KERNEL(64, 1) void matrix_bf16(Arrays p) { matrix<mla::bf16>(p); }
MLA_KERNEL(64, 1) void matrix_fp16(Arrays p) { matrix<mla::fp16>(p); }

// out[16][16] = in[16][32] * in2[16][32]^T, a 16-byte chunk per lane.
MLA_KERNEL(64, 1) void chunk_bf16(Arrays p) {
  const Lane lane = Lane::current();
  const int at = lane.column * 4 + lane.group;
  const f32x4 d = multiply_chunk<mla::bf16>(static_cast<const u32x4*>(p.in)[at], static_cast<const u32x4*>(p.in2)[at],
                                            f32x4{0.0f, 0.0f, 0.0f, 0.0f});
  for (int r = 0; r < 4; ++r) static_cast<float*>(p.out)[(4 * lane.group + r) * 16 + lane.column] = d[r];
}

// in[64][4] words, keys of a pair of columns -> out[64][2][2] words.
MLA_KERNEL(64, 1) void transpose(Arrays p) {
  const int lane = Lane::current().index;
  const u32x4 keys = static_cast<const u32x4*>(p.in)[lane];
  const KeyColumns columns = transpose_pair(keys[0], keys[1], keys[2], keys[3]);
  static_cast<u32x2*>(p.out)[lane * 2] = columns.first;
  static_cast<u32x2*>(p.out)[lane * 2 + 1] = columns.second;
}

// out[64][4]: the value of lane 63 - l, the maximum and the sum over the groups, the broadcast of lane 5.
MLA_KERNEL(64, 1) void cross_lane(Arrays p) {
  const Lane lane = Lane::current();
  const float x = static_cast<const float*>(p.in)[lane.index];
  const uint32_t five = broadcast(mla::bit_cast<uint32_t>(x), 5);
  static_cast<f32x4*>(p.out)[lane.index] = f32x4{shuffle(x, 63 - lane.index), max_over_groups(x, lane),
                                                 sum_over_groups(x, lane), mla::bit_cast<float>(five)};
}

// in[64][2] floats -> out[64][3] words: nearest bf16, P as bf16, fp16.
MLA_KERNEL(64, 1) void convert(Arrays p) {
  const int lane = Lane::current().index;
  const float low = static_cast<const float*>(p.in)[lane * 2], high = static_cast<const float*>(p.in)[lane * 2 + 1];
  uint32_t* out = static_cast<uint32_t*>(p.out) + lane * 3;
  out[0] = Policy::pack<mla::bf16>(low, high);
  out[1] = Policy::pack_p<mla::bf16>(low, high);
  out[2] = Policy::pack<mla::fp16>(low, high);
}

// in[16][512] 16-bit values -> out: the tile by columns, [4 blocks][4 keys j][64 lanes][8].
MLA_KERNEL(64, 1) void latent_tile(Arrays p) {
  static MLA_SHARED __attribute__((aligned(1024))) char memory[LatentLdsTile<512, 2>::bytes];
  const LdsBytes lds = (LdsBytes)memory;
  const Lane lane = Lane::current();
  const ChunkLdsMap<LatentLdsTile<512, 2>> keys(lane);
  const ColumnLdsMap<LatentLdsTile<512, 2>> columns(lane);
  for (int c = 0; c < 16; ++c) {
    lds_write16(lds + keys.of(c), static_cast<const u32x4*>(p.in)[lane.column * 64 + c * 4 + lane.group]);
  }
  wave_lds_fence();
  for (int b = 0; b < 4; ++b) {
    for (int j = 0; j < 4; ++j) {
      static_cast<u32x4*>(p.out)[(b * 4 + j) * 64 + lane.index] = lds_read16(lds + columns.of(b, j));
    }
  }
}

// in: three floats per score, [64][4] scores of 16 rows x 16 keys, in accumulator order. Two tiles through the softmax:
// out[2][64][2] words of P, out2[64][2]: max and sum over the groups.
MLA_KERNEL(64, 1) void softmax(Arrays p) {
  using Softmax = TileSoftmax<Policy, PvSameType<Policy, mla::bf16>, 1>;
  const Lane lane = Lane::current();
  Softmax::Row row;
  row.clear();
  for (int tile = 0; tile < 2; ++tile) {
    f32x4 scores[1] = {static_cast<const f32x4*>(p.in)[tile * 64 + lane.index]};
    // Row r sees 16 - r keys of the second.
    if (tile == 1) RowMask{0, static_cast<uint32_t>(16 - lane.column), 0}.apply<1>(scores, 4 * lane.group);
    const float largest = lane_max(scores);
    if (any_lane(Softmax::exceeds(row, largest * 0.5f))) Softmax::raise_max(row, largest, 0.5f, lane);
    Softmax::P weights;
    Softmax::compute_p(scores, 0.5f, row, weights);
    static_cast<u32x2*>(p.out)[tile * 64 + lane.index] = weights[0];
    static_cast<float*>(p.out2)[tile * 64 + lane.index] = row.max;
  }
  static_cast<float*>(p.out2)[128 + lane.index] = sum_over_groups(row.sum, lane);
}

// in[64][2][4] words of a rope part, in2[64] positions' rows of rope_cos_sin -> out[64][2][4] words: rotated.
MLA_KERNEL(64, 1) void rope(Arrays p) {
  const Lane lane = Lane::current();
  u32x4 first = static_cast<const u32x4*>(p.in)[lane.index * 2], second = static_cast<const u32x4*>(p.in)[lane.index * 2 + 1];
  ChunkRope::load(static_cast<const float*>(p.in2) + lane.column * COS_SIN_FLOATS + lane.group * 8)
      .rotate<Policy, mla::bf16>(first, second);
  u32x4* out = static_cast<u32x4*>(p.out) + lane.index * 2;
  out[0] = first;
  out[1] = second;
}

using Plain = mla::DecodeProblem<mla::SameAsQuery<mla::bf16>, 64, 576, false>;

struct StageArrays {
  const void* cache;
  const int32_t* block_table;
  const float* rope_cos_sin;
  void* pieces;    // [stages][16-key tiles][18 pieces][64 lanes][16 bytes]
  void* columns;   // [stages][16-key tiles][4 blocks][4 keys][64 lanes][8 values]
  int32_t page;
  int32_t first_key;
  int32_t end_key;
};

// Four waves copy the stages of an item through the ring; wave 0 dumps each stage as the two products read it.
template <class Problem, int keys, class Values>
MLA_DEVICE void stages(const StageArrays& a) {
  using Ring = KvStageProducer<Problem, Policy, keys>;
  using Stage = KvStageTile<Problem, keys>;
  static MLA_SHARED __attribute__((aligned(1024))) char memory[Ring::lds_bytes];
  const LdsBytes lds = (LdsBytes)memory;
  mla::DecodeParams p;  // not zeros: clang 22 crashes where the pointer of a scalar load is known to be null
  p.kv_cache = a.cache;
  p.block_table = a.block_table;
  p.block_table_stride = 0;
  p.page = a.page;
  p.page_shift = 31 - __builtin_clz(2 * a.page - 1);
  p.page_reciprocal = static_cast<uint32_t>(((1ull << (31 + p.page_shift)) + a.page - 1) / static_cast<uint64_t>(a.page));
  p.kv_page_stride = a.page * 576;
  p.kv_token_stride = 576;
  const Lane lane = Lane::current();
  const int wave = wave_id();
  const mla::PagedKv source(p, Stage::value_bytes, 0);
  const KvStageReadMap<Stage> places(lane);
  const int count = (a.end_key - a.first_key + keys - 1) / keys;
  Ring ring(source, mla::WorkTile{0, a.first_key, a.end_key, -1}, a.rope_cos_sin, count, lds, lane, wave);
  wait_all_loads();
  int filled = 0, used = 0;
  for (int n = 0; n < Ring::prefetch && n < count; ++n) {
    ring.copy(n, filled);
    filled = Ring::next_stage(filled);
  }
  for (int n = 0; n < count; ++n) {
    ring.wait(n, used);
    mla::block_sync();
    if (n + Ring::prefetch < count) ring.copy(n + Ring::prefetch, filled);
    filled = Ring::next_stage(filled);
    if (wave == 0) {
      for (int T = 0; T < keys / 16; ++T) {
        const int tile = n * (keys / 16) + T;
        for (int m = 0; m < 9 * Stage::value_bytes; ++m) {
          static_cast<u32x4*>(a.pieces)[(tile * 18 + m) * 64 + lane.index] = lds_read16(lds + used + places.of_piece(T, m));
        }
        for (int b = 0; b < 4; ++b) {
          for (int j = 0; j < 4; ++j) {
            static_cast<Values*>(a.columns)[((tile * 4 + b) * 4 + j) * 64 + lane.index] =
                *reinterpret_cast<MLA_LDS Values*>(lds + used + places.of_columns(T, b, j));
          }
        }
      }
    }
    used = Ring::next_stage(used);
  }
}
using Rotated = mla::DecodeProblem<mla::SameAsQuery<mla::bf16>, 64, 576, true>;
using Fp8 = mla::DecodeProblem<mla::Fp8Cache<mla::fp8>, 64, 576, false>;
MLA_KERNEL(256, 1) void stages_plain(StageArrays a) { stages<Plain, 16, u32x4>(a); }
MLA_KERNEL(256, 1) void stages_rotated(StageArrays a) { stages<Rotated, 16, u32x4>(a); }
MLA_KERNEL(256, 1) void stages_fp8(StageArrays a) { stages<Fp8, 32, u32x2>(a); }

// in[64][8 keys][8 columns] fp8 values, four keys of a 16-key tile and four of the next -> out[64][8 columns][8 keys],
// out2[64][8 columns][4 keys] of the first tile in bf16: what both kinds of PV multiply.
MLA_KERNEL(64, 1) void columns_fp8(Arrays p) {
  const int lane = Lane::current().index;
  u32x2 keys[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) keys[j] = static_cast<const u32x2*>(p.in)[lane * 8 + j];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    PvFp8<Policy>::Unit unit;
#pragma unroll
    for (int step = 0; step < unit.steps; ++step) unit.step(keys, u, step);
#pragma unroll
    for (int c = 0; c < unit.columns; ++c) static_cast<u32x2*>(p.out)[lane * 8 + u * unit.columns + c] = unit.column[c];
  }
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    PvFp8ToBf16<Policy>::Unit unit;
#pragma unroll
    for (int step = 0; step < unit.steps; ++step) unit.step(keys, u, step);
#pragma unroll
    for (int c = 0; c < unit.columns; ++c) static_cast<u32x2*>(p.out2)[lane * 8 + u * unit.columns + c] = unit.column[c];
  }
}

// in[4 waves][2 tiles][32][64][4] floats of output, in2[4][2][2][64]: max and sum -> out, out2: the same, merged by two
// groups of two waves.
MLA_KERNEL(256, 1) void key_groups(Arrays p) {
  static MLA_SHARED __attribute__((aligned(1024))) char memory[4 * 8192 + 4 * 256];
  const Lane lane = Lane::current();
  const int wave = wave_id();
  AccumO<512> output[2];
  SoftmaxRow<false> softmax[2];
  for (int r = 0; r < 2; ++r) {
    const float* statistics = static_cast<const float*>(p.in2) + (wave * 2 + r) * 2 * WAVE + lane.index;
    softmax[r].max = statistics[0];
    softmax[r].sum = statistics[WAVE];
    const f32x4* tiles = static_cast<const f32x4*>(p.in) + (wave * 2 + r) * 32 * WAVE + lane.index;
#pragma unroll
    for (int n = 0; n < 32; ++n) output[r].tile[n / BLOCK_TILES][n % BLOCK_TILES] = tiles[n * WAVE];
  }
  merge_key_groups<Policy, 2>((LdsBytes)memory, wave, wave / 2, 2, lane, softmax, output);
  for (int r = 0; r < 2; ++r) {
    float* statistics = static_cast<float*>(p.out2) + (wave * 2 + r) * 2 * WAVE + lane.index;
    statistics[0] = softmax[r].max;
    statistics[WAVE] = softmax[r].sum;
    f32x4* tiles = static_cast<f32x4*>(p.out) + (wave * 2 + r) * 32 * WAVE + lane.index;
#pragma unroll
    for (int n = 0; n < 32; ++n) tiles[n * WAVE] = output[r].tile[n / BLOCK_TILES][n % BLOCK_TILES];
  }
}
