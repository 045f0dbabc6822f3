// The two products of a tile on CDNA4's matrix instructions, by how queries, keys and weights are stored. As in
// attention_tile.hpp both are held transposed, so a lane owns one query row and weights never leave their lane.
//
// A lane holds 16-byte pieces of a row: piece m is bytes 64 m + 16 * lane.group + 0..15, of a key or of a query.
#pragma once

#include "cdna/accumulation.hpp"
#include "cdna/cross_lane.hpp"
#include "cdna/query.hpp"
#include "cdna/slotted_tile.hpp"
#include "common/online_softmax.hpp"
#include "common/problem.hpp"

namespace cdna {

// How scores are made: `Keys` is what two neighbouring pieces of a key become, once for all rows they meet; where rows
// have an odd number of pieces, `Tail` is the last one, given with `beside`, another piece of the same key, which it
// uses where `pads_tail`.

// Keys in the type of the products (bf16, fp16).
template <class Problem>
struct SameTypeScores {
  static constexpr bool pads_tail = false;
  using Element = typename Problem::Element;
  using Query = QueryTile<Problem, 8>;
  struct Keys {
    u32x4 low, high;
  };

  MLA_DEVICE static Keys keys(u32x4 low, u32x4 high) { return Keys{low, high}; }
  MLA_DEVICE static f32x4 multiply(const Keys& keys, const Query& query, int n, f32x4 sum) {
    sum = Matrix16x16x32<Element>::multiply(keys.low, query.chunk[2 * n], sum);
    return Matrix16x16x32<Element>::multiply(keys.high, query.chunk[2 * n + 1], sum);
  }
};

// fp8 keys and bf16 queries: keys become bf16.
template <class Policy, class Problem>
struct ConvertedScores {
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
    sum = Matrix16x16x32<mla::bf16>::multiply(keys.low, query.chunk[2 * m], sum);
    return Matrix16x16x32<mla::bf16>::multiply(keys.high, query.chunk[2 * m + 1], sum);
  }
};

// fp8 keys and queries: 128 columns at once. The 64 left over of 576 take a whole product, too, in which the query has
// zeros. The instruction of 32 columns needs as many clocks for them, but fewer passes: between two instructions of
// different passes on one accumulator the ISA asks for up to ten others. The key's half that meets zeros is a piece it
// was multiplied with before, so a NaN there makes no score NaN that is not already.
template <class Problem>
struct NarrowScores {
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
    return multiply_fp8x128(left, keys(query.piece[2 * n], query.piece[2 * n + 1]), sum);
  }
  MLA_DEVICE static f32x4 multiply_tail(Tail left, const Query& query, f32x4 sum) {
#if __clang_major__ < 22
    const uint32_t zero = rederived(0);  // these compilers have no registers left to keep the zeros in
    return multiply_fp8x128(left, keys(query.piece[Query::pieces - 1], u32x4{zero, zero, zero, zero}), sum);
#else
    return multiply_fp8x128(left, query.tail, sum);
#endif
  }
};

// How values are multiplied: `keys` of them at once, of which a lane reads `reads` of ColumnPieces, and what a lane's
// weights for them become. `headroom`: the largest weight is 2 to this power (a row's reference lies as far below its
// largest score). `converted`: values change their type on the way. `coarse`: rounding shifts the sum of the weights so
// far that outputs are divided by that of the rounded ones.

// Weights and values in a 16-bit type.
template <class Policy, class Element>
struct WideValues {
  static constexpr int keys = 32;
  static constexpr int reads = 2;
  static constexpr float headroom = 0.0f;
  static constexpr bool coarse = false;
  static constexpr bool converted = false;
  using Columns = u32x4;
  using Rows = u32x4;

  MLA_DEVICE static Columns columns(const u32x2 (&read)[reads]) {
    return u32x4{read[0][0], read[0][1], read[1][0], read[1][1]};
  }
  MLA_DEVICE static f32x4 multiply(Columns columns, Rows rows, f32x4 sum) {
    return Matrix16x16x32<Element>::multiply(columns, rows, sum);
  }
  // Weights of 32 keys: both 16-key tiles of scores, four keys each.
  MLA_DEVICE static Rows pack(const f32x4* p) {
    return u32x4{Policy::template pack_weights<Element>(p[0][0], p[0][1]),
                 Policy::template pack_weights<Element>(p[0][2], p[0][3]),
                 Policy::template pack_weights<Element>(p[1][0], p[1][1]),
                 Policy::template pack_weights<Element>(p[1][2], p[1][3])};
  }
};

// bf16 weights and fp8 values, which become bf16.
template <class Policy>
struct ConvertedValues : WideValues<Policy, mla::bf16> {
  static constexpr int reads = 1;
  static constexpr bool converted = true;

  MLA_DEVICE static u32x4 columns(const u32x2 (&read)[reads]) { return Policy::fp8_to_bf16(read[0]); }
};

// fp8 weights and values, `keys_` (32 or 128) at once; 32 by the instruction of half rate. The reference is the row's
// largest score itself, so that the largest weight is a power of two and exact, as far up in the type's range as one
// can be.
template <class Policy, int keys_>
struct NarrowValues {
  static constexpr int keys = keys_;
  static constexpr int reads = keys / 32;
  static constexpr int words = keys / 16;
  static constexpr float headroom = mla::RowSoftmax::LAG;  // so that any score above the reference renews it
  static constexpr bool coarse = true;
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
      return multiply_fp8x128(columns, rows, sum);
    } else {
      return Matrix16x16x32<mla::fp8>::multiply(columns, rows, sum);
    }
  }
  MLA_DEVICE static Rows pack(const f32x4* p) {
    Rows rows;
#pragma unroll
    for (int T = 0; T < words; ++T) {
      rows[T] =
          Policy::template pack_fp8<true>(p[T][2], p[T][3], Policy::template pack_fp8<false>(p[T][0], p[T][1], 0));
    }
    return rows;
  }
  MLA_DEVICE static float sum_of(Rows rows) {
    float sum = 0.0f;
#pragma unroll
    for (int T = 0; T < words; ++T) sum += Policy::sum_of_fp8(rows[T]);
    return sum;
  }
};

// O^T of 16 rows. tile[t]: element r of a lane is column 16 t + 4 * lane.group + r of row lane.column.
struct WideOutput {
  static constexpr int tiles = mla::VALUE_DIM / 16;
  f32x4 tile[tiles];

  MLA_DEVICE void clear() {
    const float zero = mla::bit_cast<float>(rederived(0));  // a constant would be kept in registers between items
#pragma unroll
    for (int t = 0; t < tiles; ++t) tile[t] = f32x4{zero, zero, zero, zero};
  }
  // The last `ordinary` tiles are kept in ordinary registers by their owner.
  template <int ordinary = 0>
  MLA_DEVICE void scale(float factor) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      if (t < tiles - ordinary) keep_accumulated(tile[t]);
      tile[t] *= factor;
      if (t < tiles - ordinary) keep_accumulated(tile[t]);
      if (t % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or all tiles pass through ordinary registers at once
    }
  }
};

// A row's softmax so far: lse comes from `sum`, outputs are divided by `divisor`.
template <bool coarse>
struct WideRow : mla::RowSoftmax {
  MLA_DEVICE void clear() {
    max = NOTHING;
    sum = 0.0f;
  }
  MLA_DEVICE void scale(float factor) { sum *= factor; }
  // The sums of the four lanes that share the row, in each of them.
  MLA_DEVICE void join(const Lane& lane) { sum = sum_over_groups(sum, lane); }
  MLA_DEVICE float divisor() const { return sum; }
};
template <>
struct WideRow<true> : mla::RowSoftmax {
  float rounded_sum;

  // Not as constants: LLVM 20 and 21 store two of those at once, and then keep all three in LDS.
  MLA_DEVICE void clear() {
    const float zero = mla::bit_cast<float>(rederived(0));
    max = NOTHING;
    sum = zero;
    rounded_sum = zero;
  }
  MLA_DEVICE void scale(float factor) {
    sum *= factor;
    rounded_sum *= factor;
  }
  MLA_DEVICE void join(const Lane& lane) {
    sum = sum_over_groups(sum, lane);
    rounded_sum = sum_over_groups(rounded_sum, lane);
  }
  MLA_DEVICE float divisor() const { return rounded_sum; }
};

// Softmax of 16 query rows over `score_tiles` tiles of 16 keys: element r of tile T of a lane is key
// 16 T + 4 * lane.group + r.
template <class Policy, class Values, int score_tiles>
struct WideSoftmax {
  static constexpr int products = score_tiles * 16 / Values::keys;  // of the values, per column tile
  using Scores = f32x4[score_tiles];
  using Weights = typename Values::Rows[products];
  using Row = WideRow<Values::coarse>;

  // Scores of keys the row may not see become -inf.
  MLA_DEVICE static void mask(Scores& scores, int first_key, int visible, const Lane& lane) {
    const int seen = visible - first_key - 4 * lane.group;
#pragma unroll
    for (int T = 0; T < score_tiles; ++T)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float score = scores[T][r];
        scores[T][r] = 16 * T + r < seen ? score : mla::MINUS_INFINITY;
      }
  }

  MLA_DEVICE static float largest(const Scores& scores) {
    float largest = scores[0][0];
#pragma unroll
    for (int n = 1; n < 4 * score_tiles; ++n) {
      const float score = scores[n / 4][n % 4];
      largest = __builtin_fmaxf(largest, score);
    }
    return largest;
  }

  // A new reference for the row, by which no weight exceeds 2^headroom; the factor for what was accumulated so far.
  MLA_DEVICE static float raise_reference(Row& row, float lane_largest, float scale, const Lane& lane) {
    const float max = __builtin_fmaxf(row.max, max_over_groups(lane_largest, lane) * scale - Values::headroom);
    const float factor = Policy::exp2(row.max - max);
    row.max = max;
    row.scale(factor);
    return factor;
  }

  // Scores become weights. The lane's part of the sums stays in the lane.
  MLA_DEVICE static void weigh(Scores& scores, float scale, Row& row, Weights& weights) {
#pragma unroll
    for (int T = 0; T < score_tiles; ++T) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float score = scores[T][r];
        scores[T][r] = Policy::exp2(__builtin_fmaf(score, scale, -row.max));
      }
      row.sum += (scores[T][0] + scores[T][1]) + (scores[T][2] + scores[T][3]);
    }
#pragma unroll
    for (int n = 0; n < products; ++n) {
      weights[n] = Values::pack(scores + n * (Values::keys / 16));
      if constexpr (Values::coarse) row.rounded_sum += Values::sum_of(weights[n]);
    }
  }

  // What turns a row's accumulated values into its output, by that of a row divided by `sum`.
  MLA_DEVICE static float output_weight(float weight, float sum, float divisor) {
    if constexpr (!Values::coarse) return weight;
    return mla::bit_cast<uint32_t>(divisor) != 0 ? weight * sum * Policy::reciprocal(divisor) : 0.0f;
  }
};

}  // namespace cdna
