// QK^T and PV of a tile, by the types of queries, keys and P. Both are held transposed (S^T = K Q^T, O^T = V^T P^T), so
// a lane owns one query row and P never leaves its lane.
//
// A lane holds 16-byte pieces of a row: piece m is bytes 64 m + 16 * lane.group + 0..15, of a key or of a query.
#pragma once

#include "cdna/common/convert.hpp"
#include "cdna/common/swizzled_lds_tile.hpp"
#include "cdna/decode/query.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"

namespace cdna::mfma_16x16x32 {

// QK^T. `Keys` is the operand that two neighbouring pieces of a key become, once for all row tiles that they meet;
// where a row has an odd number of pieces, `Tail` is the operand of the last one. It is made with `beside`, another
// piece of the same key, which it uses where `pads_tail`.

// Keys in the type of the products (bf16, fp16).
template <class Problem>
struct QkSameType {
  static constexpr bool pads_tail = false;
  using Element = typename Problem::Element;
  using Query = QueryTile<Problem, 8>;
  struct Keys {
    u32x4 low, high;
  };

  MLA_DEVICE static Keys keys(u32x4 low, u32x4 high) { return Keys{low, high}; }
  MLA_DEVICE static u32x4 tail(u32x4 piece, u32x4 /*beside*/) { return piece; }
  MLA_DEVICE static f32x4 multiply(const Keys& keys, const Query& query, int n, f32x4 sum) {
    sum = Mfma16x16x32<Element>::multiply(keys.low, query.chunk[2 * n], sum);
    return Mfma16x16x32<Element>::multiply(keys.high, query.chunk[2 * n + 1], sum);
  }
  MLA_DEVICE static f32x4 multiply_tail(u32x4 keys, const Query& query, f32x4 sum) {
    return Mfma16x16x32<Element>::multiply(keys, query.chunk[Query::chunks - 1], sum);
  }
};

// fp8 keys and bf16 queries: the keys become bf16.
template <class Problem, class Policy>
struct QkFp8ToBf16 {
  static constexpr bool pads_tail = false;
  using Query = QueryTile<Problem, 16>;
  struct Tail {
    u32x4 low, high;
  };
  struct Keys {
    Tail low, high;
  };

  MLA_DEVICE static Tail tail(u32x4 piece, u32x4 /*beside*/) {
    return Tail{Policy::fp8_to_bf16(u32x2{piece[0], piece[1]}), Policy::fp8_to_bf16(u32x2{piece[2], piece[3]})};
  }
  MLA_DEVICE static Keys keys(u32x4 low, u32x4 high) { return Keys{tail(low, low), tail(high, high)}; }
  MLA_DEVICE static f32x4 multiply(const Keys& keys, const Query& query, int n, f32x4 sum) {
    return multiply_piece(keys.high, query, 2 * n + 1, multiply_piece(keys.low, query, 2 * n, sum));
  }
  MLA_DEVICE static f32x4 multiply_tail(const Tail& keys, const Query& query, f32x4 sum) {
    return multiply_piece(keys, query, Query::chunks / 2 - 1, sum);
  }

 private:
  MLA_DEVICE static f32x4 multiply_piece(const Tail& keys, const Query& query, int m, f32x4 sum) {
    sum = Mfma16x16x32<mla::bf16>::multiply(keys.low, query.chunk[2 * m], sum);
    return Mfma16x16x32<mla::bf16>::multiply(keys.high, query.chunk[2 * m + 1], sum);
  }
};

// fp8 keys and queries: 128 columns at once. The last 64 of 576 take a whole product as well, in which the query has
// zeros. The instruction of 32 columns needs as many clocks for them, but fewer passes: between two instructions of
// different passes on one accumulator the ISA asks for up to ten others. The key's half that meets zeros is a piece it
// was multiplied with before, so a NaN there makes no score NaN that is not already.
template <class Problem>
struct QkFp8 {
  static constexpr bool pads_tail = true;
  struct Query {
    static constexpr int pieces = Problem::row_bytes / 64;
    u32x4 piece[pieces];
    u32x8 tail;  // the last piece, then zeros

    MLA_DEVICE static Query load(const mla::DecodeParams& p, const mla::SequenceRows& rows, int first_row,
                                 const Lane& lane) {
      const char* from = query_row<mla::fp8>(p, rows, first_row, lane) + lane.group * 16;
      Query query;
#pragma unroll
      for (int m = 0; m < pieces; ++m) query.piece[m] = *reinterpret_cast<const u32x4*>(from + m * 64);
      query.tail = keys(query.piece[pieces - 1], u32x4{0, 0, 0, 0});
      return query;
    }
  };
  using Keys = u32x8;
  using Tail = u32x8;

  MLA_DEVICE static Keys keys(u32x4 low, u32x4 high) {
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  MLA_DEVICE static Tail tail(u32x4 piece, u32x4 beside) { return keys(piece, beside); }
  MLA_DEVICE static f32x4 multiply(Keys left, const Query& query, int n, f32x4 sum) {
    return mfma_16x16x128_fp8(left, keys(query.piece[2 * n], query.piece[2 * n + 1]), sum);
  }
  MLA_DEVICE static f32x4 multiply_tail(Tail left, const Query& query, f32x4 sum) {
#if __clang_major__ < 22
    const uint32_t zero = rematerialized(0);  // these compilers have no registers left to keep the zeros in
    return mfma_16x16x128_fp8(left, keys(query.piece[Query::pieces - 1], u32x4{zero, zero, zero, zero}), sum);
#else
    return mfma_16x16x128_fp8(left, query.tail, sum);
#endif
  }
};

// PV. One product contracts `keys` keys, for which a lane makes `reads` reads of ColumnReadMap.
//   headroom                    log2 of the largest P: the running max lies this far below a row's largest score
//   converted                   values change their type between LDS and the product
//   normalizes_by_rounded_sum   rounding P shifts its sum so far that outputs are divided by the sum of the rounded P

// P and values in a 16-bit type.
template <class Policy, class Element>
struct PvSameType {
  static constexpr int keys = 32;
  static constexpr int reads = 2;
  static constexpr float headroom = 0.0f;
  static constexpr bool normalizes_by_rounded_sum = false;
  static constexpr bool converted = false;
  using Columns = u32x4;
  using Rows = u32x4;

  MLA_DEVICE static Columns columns(const u32x2 (&read)[reads]) {
    return u32x4{read[0][0], read[0][1], read[1][0], read[1][1]};
  }
  MLA_DEVICE static f32x4 multiply(Columns columns, Rows rows, f32x4 sum) {
    return Mfma16x16x32<Element>::multiply(columns, rows, sum);
  }
  // P of 32 keys: both 16-key tiles of scores, four keys each.
  MLA_DEVICE static Rows pack(const f32x4* p) {
    return u32x4{Policy::template pack_p<Element>(p[0][0], p[0][1]), Policy::template pack_p<Element>(p[0][2], p[0][3]),
                 Policy::template pack_p<Element>(p[1][0], p[1][1]),
                 Policy::template pack_p<Element>(p[1][2], p[1][3])};
  }
};

// P in bf16 and values in fp8, which become bf16.
template <class Policy>
struct PvFp8ToBf16 : PvSameType<Policy, mla::bf16> {
  static constexpr int reads = 1;
  static constexpr bool converted = true;

  MLA_DEVICE static u32x4 columns(const u32x2 (&read)[reads]) { return Policy::fp8_to_bf16(read[0]); }
};

// P and values in fp8, `keys_` (32 or 128) at once; 32 by the instruction of half rate. The running max is the row's
// largest score itself, so that the largest P is a power of two and exact, as far up in the type's range as one can be.
template <class Policy, int keys_>
struct PvFp8 {
  static constexpr int keys = keys_;
  static constexpr int reads = keys / 32;
  static constexpr int words = keys / 16;
  // With as much headroom as the threshold, any score above the running max raises it.
  static constexpr float headroom = mla::RowSoftmax::RESCALE_THRESHOLD;
  static constexpr bool normalizes_by_rounded_sum = true;
  static constexpr bool converted = false;
  static_assert(keys == 32 || keys == 128, "fp8 values: a product takes 32 or 128 keys");
  typedef uint32_t Columns __attribute__((ext_vector_type(words)));
  typedef uint32_t Rows __attribute__((ext_vector_type(words)));

  MLA_DEVICE static Columns columns(const u32x2 (&read)[reads]) {
    Columns columns;
#pragma unroll
    for (int i = 0; i < reads; ++i) {
      columns[2 * i] = read[i][0];
      columns[2 * i + 1] = read[i][1];
    }
    return columns;
  }
  MLA_DEVICE static f32x4 multiply(Columns columns, Rows rows, f32x4 sum) {
    if constexpr (keys == 128) {
      return mfma_16x16x128_fp8(columns, rows, sum);
    } else {
      return Mfma16x16x32<mla::fp8>::multiply(columns, rows, sum);
    }
  }
  MLA_DEVICE static Rows pack(const f32x4* p) {
    Rows rows;
#pragma unroll
    for (int T = 0; T < words; ++T) rows[T] = pack_fp8(p[T]);
    return rows;
  }
  MLA_DEVICE static float sum_of(Rows rows) {
    float sum = 0.0f;
#pragma unroll
    for (int T = 0; T < words; ++T) sum += sum_of_fp8(rows[T]);
    return sum;
  }
};

// Makes left operands of `pair` column tiles from `first` on, of which `values` holds the transposed reads.
template <class Pv, int pair, int products, int tiles, int reads>
MLA_DEVICE void columns_of(const u32x2 (&values)[tiles][reads], int first,
                           typename Pv::Columns (&columns)[pair][products]) {
#pragma unroll
  for (int i = 0; i < pair * products; ++i) {
    u32x2 read[Pv::reads];
#pragma unroll
    for (int k = 0; k < Pv::reads; ++k) read[k] = values[first + i % pair][i / pair * Pv::reads + k];
    columns[i % pair][i / pair] = Pv::columns(read);
  }
  if (Pv::converted) __builtin_amdgcn_sched_barrier(0);  // or a product follows each conversion, and waits for it
}

}  // namespace cdna::mfma_16x16x32
