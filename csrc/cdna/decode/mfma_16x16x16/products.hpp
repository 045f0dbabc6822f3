// QK^T and PV of 16 keys or 32, by the types of queries, keys and P. Both are held transposed (S^T = K Q^T, O^T = V^T
// P^T), so a lane owns one query row and P never leaves its lane.
#pragma once

#include "cdna/common/convert.hpp"
#include "cdna/common/mfma_16x16x16.hpp"
#include "cdna/common/mfma_16x16x32.hpp"
#include "cdna/common/transpose.hpp"
#include "cdna/decode/query.hpp"
#include "common/online_softmax.hpp"

namespace cdna::mfma_16x16x16 {

// QK^T. A lane holds 16-byte pieces of a row: piece m is bytes 64 m + 16 * lane.group + 0..15, of a key or of a query.
// `Keys` are the operands that a piece of a key becomes, once for all row tiles that it meets, by `steps` instructions
// that the mainloop places between products; they meet a piece of a query in `products` products.

// Keys in the type of the products (bf16, fp16).
template <class Problem>
struct QkSameType {
  static constexpr int products = 2;
  using Query = QueryTile<Problem>;
  struct Keys {
    static constexpr int steps = 0;
    u32x4 piece;
  };

  MLA_DEVICE static f32x4 multiply(const Keys& keys, const Query& query, int m, int n, f32x4 sum) {
    using Mma = Mfma16x16x16<typename Problem::Element>;
    return n == 0 ? Mma::multiply(keys.piece.xy, query.chunk[m].xy, sum)
                  : Mma::multiply(keys.piece.zw, query.chunk[m].zw, sum);
  }
};

// fp8 keys and bf16 queries: the keys become bf16.
template <class Problem>
struct QkFp8ToBf16 {
  static constexpr int products = 4;
  using Query = QueryTile<Problem, 16>;
  struct Keys {
    static constexpr int steps = 16;
    u32x4 piece;
    u32x2 four[4];
    f32x2 pair[2];

    MLA_DEVICE void step(int step) {
      const int w = step / 4, half = step % 2;
      if (step % 4 < 2) {
        pair[half] = fp8_pair_to_f32(piece[w], half == 1);
      } else {
        four[w][half] = truncate_to_bf16(pair[half][0], pair[half][1]);
      }
    }
  };

  MLA_DEVICE static f32x4 multiply(const Keys& keys, const Query& query, int m, int n, f32x4 sum) {
    const u32x4 chunk = query.chunk[2 * m + n / 2];
    return Mfma16x16x16<mla::bf16>::multiply(keys.four[n], n % 2 == 0 ? chunk.xy : chunk.zw, sum);
  }
};

// fp8 keys and queries, as they are stored.
template <class Problem>
struct QkFp8 {
  static constexpr int products = 2;
  struct Query {
    static constexpr int pieces = Problem::row_bytes / 64;
    u32x4 piece[pieces];

    MLA_DEVICE static Query load(const mla::DecodeParams& p, const mla::SequenceRows& rows, int first_row,
                                 const Lane& lane) {
      const char* from = query_row<mla::fp8>(p, rows, first_row, lane) + lane.group * 16;
      Query query;
#pragma unroll
      for (int m = 0; m < pieces; ++m) query.piece[m] = *reinterpret_cast<const u32x4*>(from + m * 64);
      return query;
    }
  };
  struct Keys {
    static constexpr int steps = 0;
    u32x4 piece;
  };

  MLA_DEVICE static f32x4 multiply(const Keys& keys, const Query& query, int m, int n, f32x4 sum) {
    using Mma = Mfma16x16x32<mla::fp8>;
    return n == 0 ? Mma::multiply(keys.piece.xy, query.piece[m].xy, sum)
                  : Mma::multiply(keys.piece.zw, query.piece[m].zw, sum);
  }
};

constexpr int BLOCK_COLUMNS = 128;  // output columns that one read of values brings, eight of a lane
constexpr int BLOCK_TILES = 8;

// PV. One product contracts `keys` keys. A lane reads `Values`, eight columns of a key, and holds the keys whose P it
// has, four of each 16-key tile. A `Unit` are the operands of `columns` of these columns, made by `steps` vector
// instructions, one or two in a step, so that the mainloop can place them between products.
//   headroom                    log2 of the largest P: the running max lies this far below a row's largest score
//   normalizes_by_rounded_sum   rounding P shifts its sum so far that outputs are divided by the sum of the rounded P

// P and values in a 16-bit type.
template <class Policy, class Element>
struct PvSameType {
  static constexpr int keys = 16;
  static constexpr float headroom = 0.0f;
  static constexpr bool normalizes_by_rounded_sum = false;
  using Values = u32x4;
  using Rows = u32x2;
  struct Unit {
    static constexpr int columns = 2;
    static constexpr int steps = 4;
    u32x2 column[columns];

    // Makes unit `u` of the eight columns that `v` holds of four keys.
    MLA_DEVICE void step(const Values* v, int u, int step) {
      const uint32_t first = v[step % 2 * 2][u], second = v[step % 2 * 2 + 1][u];
      column[step / 2][step % 2] = step < 2 ? low_halves(first, second) : high_halves(first, second);
    }
  };

  MLA_DEVICE static f32x4 multiply(u32x2 column, Rows rows, f32x4 sum) {
    return Mfma16x16x16<Element>::multiply(column, rows, sum);
  }
  MLA_DEVICE static Rows pack(const f32x4* p) {
    return u32x2{Policy::template pack_p<Element>(p[0][0], p[0][1]),
                 Policy::template pack_p<Element>(p[0][2], p[0][3])};
  }
};

// P in bf16 and values in fp8, which become bf16 as they are transposed.
template <class Policy>
struct PvFp8ToBf16 : PvSameType<Policy, mla::bf16> {
  using Values = u32x2;
  struct Unit {
    static constexpr int columns = 2;
    static constexpr int steps = 8;
    u32x2 column[columns];
    f32x2 pair[4];

    MLA_DEVICE void step(const Values* v, int u, int step) {
      if (step < 4) {
        pair[step] = fp8_pair_to_f32(v[step][u / 2], u % 2 == 1);
      } else {
        const int c = step % 4 / 2, half = step % 2;
        column[c][half] = truncate_to_bf16(pair[2 * half][c], pair[2 * half + 1][c]);
      }
    }
  };
};

// P and values in fp8. The running max is as far below the row's largest score as the type's range allows, and any
// score above that one raises it, so that the largest P is a power of two and exact.
template <class Policy>
struct PvFp8 {
  static constexpr int keys = 32;
  static constexpr float headroom = 7.0f;  // FNUZ e4m3 ends at 240
  static constexpr bool normalizes_by_rounded_sum = true;
  using Values = u32x2;
  using Rows = u32x2;
  // Of eight keys: four of a 16-key tile, then four of the next.
  struct Unit {
    static constexpr int columns = 4;
    static constexpr int steps = 16;
    u32x2 column[columns];
    uint32_t mixed[2][2][2];  // [four keys][low or high bytes][two keys]

    MLA_DEVICE void step(const Values* v, int u, int step) {
      const int four = step / 4 % 2, high = step / 2 % 2, two = step % 2;
      if (step < 8) {
        const uint32_t first = v[4 * four + 2 * two][u], second = v[4 * four + 2 * two + 1][u];
        mixed[four][high][two] = high ? mix_high_bytes(first, second) : mix_low_bytes(first, second);
      } else {
        const uint32_t(&from)[2] = mixed[four][high];
        column[2 * high + two][four] = two ? high_halves(from[0], from[1]) : low_halves(from[0], from[1]);
      }
    }
  };

  MLA_DEVICE static f32x4 multiply(u32x2 column, Rows rows, f32x4 sum) {
    return Mfma16x16x32<mla::fp8>::multiply(column, rows, sum);
  }
  MLA_DEVICE static Rows pack(const f32x4* p) { return u32x2{pack_fp8(p[0]), pack_fp8(p[1])}; }
  MLA_DEVICE static float sum_of(Rows rows) { return sum_of_fp8(rows[0]) + sum_of_fp8(rows[1]); }
};

}  // namespace cdna::mfma_16x16x16
