// Queries of swap_ab: from the ring, as they are stored, to fp16 in the order and swizzle in which Q^T is multiplied.
//
// A lane of S^T reads 16 bytes of a key, which are four of its values in each of four steps. So position 16j + 2t + b
// of 64 columns holds column 16t + 4j + b, and position 16j + 8 + 2t + b holds column 16t + 4j + 2 + b, for t, j = 0..3
// and b = 0, 1.
#pragma once

#include "sm_90/decode/convert_fp8.hpp"
#include "sm_90/decode/scaled_queries.hpp"
#include "sm_90/decode/swap_ab/shared_storage.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

// Eight neighbouring values of a query row, as they are stored, and as fp16.
template <class Query>
struct QueryPiece {
  static constexpr int WORDS = 4;
  uint32_t words[WORDS];
  MLA_DEVICE void load(uint32_t from) { ld_shared_v4(from, words); }
  MLA_DEVICE float largest() const { return 0.0f; }
  MLA_DEVICE uint32_t fp16_pair(int i, float) const { return words[i]; }
};

template <>
struct QueryPiece<fp8> {
  uint32_t words[2];
  MLA_DEVICE void load(uint32_t from) { ld_shared_v2(from, words); }
  MLA_DEVICE float largest() const { return 0.0f; }
  MLA_DEVICE uint32_t fp16_pair(int i, float) const {
    uint32_t pairs[2];
    e4m3_to_fp16(words[i / 2], pairs[0], pairs[1]);
    return pairs[i % 2];
  }
};

// A row is scaled by a power of two (scaled_queries.hpp).
template <>
struct QueryPiece<bf16> {
  uint32_t words[4];
  MLA_DEVICE void load(uint32_t from) { ld_shared_v4(from, words); }
  MLA_DEVICE static float low(uint32_t word) { return bit_cast<float>(word << 16); }
  MLA_DEVICE static float high(uint32_t word) { return bit_cast<float>(word & 0xFFFF0000u); }
  MLA_DEVICE float largest() const {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) top = fmaxf(top, fmaxf(fabsf(low(words[i])), fabsf(high(words[i]))));
    return top;
  }
  MLA_DEVICE uint32_t fp16_pair(int i, float factor) const {
    return bf16_to_fp16(words[i], factor);
  }
};

// Takes a tile's queries from their stages: eight lanes a row, four rows a warp at a time. `scale` is the scores' own;
// each row's goes to `rows` with a running max that no key has raised.
template <class Traits>
class SwapAbQueries {
  using Query = typename Traits::QueryElement;
  using Storage = SharedStorage<Traits>;
  static constexpr int BLOCKS = Traits::COLUMN_BLOCKS;
  static constexpr bool SCALES = QueryTypes<Query>::Element::is_bf16;

 public:
  // `row` is of the block, `from` where it lies as it is stored, `present` whether the sequence has it. Called by
  // warps.
  MLA_DEVICE static void take_row(uint32_t shared, int row, uint32_t from, bool present, float scale) {
    const int piece = thread_id() % 8;
    QueryPiece<Query> stored[BLOCKS];
    float top = 0.0f;
#pragma unroll
    for (int c = 0; c < BLOCKS; ++c) {
      stored[c].load(from + (c * 8 + piece) * (Traits::Q_ROW_BYTES / (BLOCKS * 8)));
      top = fmaxf(top, stored[c].largest());
    }
    float factor = 1.0f;
    if constexpr (SCALES) {
#pragma unroll
      for (int lane = 1; lane < 8; lane *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lane));
      factor = present ? power_to_fp16(top) : 1.0f;
    }
    // Pair i of the lane's four is of step `piece % 2 * 2 + i / 2` and of that step's half i % 2.
    const uint32_t to = shared + Storage::Q + row * 128 + piece / 2 * 4;
#pragma unroll
    for (int c = 0; c < BLOCKS; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        st_shared(to + c * Traits::Q_BLOCK_BYTES + ((piece % 2 * 4 + i) ^ row % 8) * 16,
                  present ? stored[c].fp16_pair(i, factor) : 0u);
    if (piece == 0) {
      const uint32_t at = shared + Storage::SCALE_AND_MAX + row * 8;
      st_shared(at, nonzero_scale(scale / factor));
      st_shared(at + 4, LOWEST);
    }
  }
};

}  // namespace mla::sm_90
