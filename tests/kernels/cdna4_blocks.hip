// One kernel per building block that csrc/cdna has for CDNA4: matrix instructions, and tiles of keys as both products read them.
#include "cdna/common/lds_copy.hpp"
#include "cdna/common/mfma_16x16x32.hpp"
#include "cdna/decode/mfma_16x16x32/producer_lds_ring.hpp"
#include "gfx950/policy.hpp"

using namespace cdna;
using namespace cdna::mfma_16x16x32;
using Policy = gfx950::Policy;

struct Arrays {
  const void* left;    // [16 rows][k]
  const void* right;   // [16 columns][k]
  float* out;          // [16][16]
};

MLA_DEVICE void store(const Arrays& p, const Lane& lane, f32x4 d) {
  for (int r = 0; r < 4; ++r) p.out[(4 * lane.group + r) * 16 + lane.column] = d[r];
}

template <class Element>
MLA_DEVICE void matrix(const Arrays& p) {
  const Lane lane = Lane::current();
  const int at = lane.column * 4 + lane.group;
  store(p, lane, Mfma16x16x32<Element>::multiply(static_cast<const u32x4*>(p.left)[at], static_cast<const u32x4*>(p.right)[at], f32x4{}));
}
MLA_KERNEL(64, 1) void matrix_bf16(Arrays p) { matrix<mla::bf16>(p); }
MLA_KERNEL(64, 1) void matrix_fp16(Arrays p) { matrix<mla::fp16>(p); }
MLA_KERNEL(64, 1) void matrix_fp8(Arrays p) {
  const Lane lane = Lane::current();
  const int at = lane.column * 4 + lane.group;
  store(p, lane, Mfma16x16x32<mla::fp8>::multiply(static_cast<const u32x2*>(p.left)[at], static_cast<const u32x2*>(p.right)[at], f32x4{}));
}
MLA_KERNEL(64, 1) void matrix_fp8x128(Arrays p) {
  const Lane lane = Lane::current();
  u32x8 operand[2];
  for (int side = 0; side < 2; ++side) {
    const u32x4* from = static_cast<const u32x4*>(side ? p.right : p.left) + lane.column * 8 + lane.group;
    operand[side] = __builtin_shufflevector(from[0], from[4], 0, 1, 2, 3, 4, 5, 6, 7);
  }
  store(p, lane, mfma_16x16x128_fp8(operand[0], operand[1], f32x4{}));
}

struct RingArrays {
  const void* cache;            // [pages][page][576]
  const int32_t* block_table;
  u32x4* pieces;                // [tiles][keys / 16][row bytes / 64][64 lanes]
  u32x2* columns;               // [tiles][32 column tiles][reads][64 lanes]
  int32_t page;
  int32_t first_key;
  int32_t end_key;
};

// Four waves copy the tiles of an item through the ring; wave 0 dumps each as the two products read it.
template <class Problem, int keys>
MLA_DEVICE void ring(const RingArrays& a) {
  using Ring = LdsRingProducer<Problem, Policy, keys>;
  using Tile = SwizzledLdsTile<Problem::Format::bytes, Problem::row_bytes, keys>;
  constexpr int row_pieces = Problem::row_bytes / 64;
  constexpr int reads = keys / ColumnReadMap<Tile>::keys_of_read;
  static MLA_SHARED __attribute__((aligned(1024))) char memory[Ring::lds_bytes];
  const uint32_t lds = static_cast<uint32_t>(reinterpret_cast<uintptr_t>((LdsBytes)memory));
  mla::DecodeParams p;  // not zeros: clang 22 crashes where the pointer of a scalar load is known to be null
  p.kv_cache = a.cache;
  p.block_table = a.block_table;
  p.block_table_stride = 0;
  p.page = a.page;
  p.page_shift = 31 - __builtin_clz(2 * a.page - 1);
  p.page_reciprocal = static_cast<uint32_t>(((1ull << (31 + p.page_shift)) + a.page - 1) / static_cast<uint64_t>(a.page));
  p.kv_page_stride = a.page * Problem::qk_dim;
  p.kv_token_stride = Problem::qk_dim;
  const Lane lane = Lane::current();
  const int wave = wave_id();
  const mla::PagedKv source(p, Problem::Format::bytes, 0);
  const KeyReadMap<Tile> pieces(lane);
  const ColumnReadMap<Tile> columns(lane);
  const int count = (a.end_key - a.first_key + keys - 1) / keys;
  Ring stages(source, mla::WorkTile{0, a.first_key, a.end_key, -1}, nullptr, count, lds, lane, wave);
  wait_all_loads();
  uint32_t filled = 0, used = 0;
  for (int n = 0; n < Ring::prefetch && n < count; ++n) {
    stages.copy(n, filled);
    filled = Ring::next_stage(filled);
  }
  for (int n = 0; n < count; ++n) {
    stages.wait(n, used);
    mla::block_sync();
    if (n + Ring::prefetch < count) stages.copy(n + Ring::prefetch, filled);
    filled = Ring::next_stage(filled);
    if (wave == 0) {
#pragma unroll
      for (int T = 0; T < keys / 16; ++T)
#pragma unroll
        for (int m = 0; m < row_pieces; ++m) {
          a.pieces[((n * (keys / 16) + T) * row_pieces + m) * 64 + lane.index] = lds_read16(pieces.of(lds + used, T, m));
        }
#pragma unroll
      for (int t = 0; t < 32; ++t)
#pragma unroll
        for (int i = 0; i < reads; ++i) a.columns[((n * 32 + t) * reads + i) * 64 + lane.index] = columns.read(lds + used, t, i);
    }
    used = Ring::next_stage(used);
  }
}
using Bf16 = mla::DecodeProblem<mla::SameAsQuery<mla::bf16>, 64, 576, false>;
using Fp8 = mla::DecodeProblem<mla::Fp8Cache<mla::fp8>, 64, 576, false>;
MLA_KERNEL(256, 1) void ring_bf16(RingArrays a) { ring<Bf16, 32>(a); }
MLA_KERNEL(256, 1) void ring_fp8_64(RingArrays a) { ring<Fp8, 64>(a); }
MLA_KERNEL(256, 1) void ring_fp8_128(RingArrays a) { ring<Fp8, 128>(a); }
