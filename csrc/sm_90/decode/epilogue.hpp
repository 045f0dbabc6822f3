// The epilogue: how a PV warpgroup's 64 rows of its columns get to memory, as 16-bit results or as fp32 partials.
#pragma once

#include "sm_90/decode/query_rows.hpp"
#include "sm_90/decode/shared_storage.hpp"
#include "sm_90/decode/softmax.hpp"

namespace mla::sm_90 {

constexpr uint32_t NO_ROW = ~0u;

// Where this warp's rows go. A lane stores 16 bytes at a time, of every fourth row.
struct OutputTarget {
  bool partial;
  float* lse;          // of the partial's rows, or of the sequence's first token
  char* begin;         // of the sequence's rows
  uint32_t offset[4];  // from `begin`, in units of 16 bytes; NO_ROW where there is no row
  float factor[2];     // scales the two accumulator rows that this lane holds, which are not the rows it stores
};

// The part of O that a PV thread holds of COLUMNS columns, in products of at most 128: tiles of 8 columns, with two
// values of its first row and two of its second in each.
template <int COLUMNS>
using AccumulatorO = float[(COLUMNS + 127) / 128][COLUMNS < 128 ? COLUMNS / 2 : 64];

// One of these tiles, each row times its factor.
template <int PRODUCTS, int VALUES>
MLA_DEVICE void scaled_tile(const float (&o)[PRODUCTS][VALUES], int tile, const float (&factor)[2], float (&four)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = o[tile / 16][tile % 16 * 4 + i] * factor[i / 2];
}

template <class Traits>
class Epilogue {
  using Element = typename Traits::OutElement;
  using Params = typename Traits::Params;
  static constexpr int COLUMNS = Traits::STORED_COLUMNS;

 public:
  static constexpr int BUFFER_BYTES = Traits::OUT_BUFFER_BYTES;
  static constexpr int PIECES = Traits::OUT_PIECES;          // that the buffer holds
  static constexpr int PIECE_BYTES = BUFFER_BYTES / PIECES;  // 128 bytes of each of a warp's rows

  // Stores COLUMNS columns from `first_column` on.
  MLA_DEVICE Epilogue(const Params& params, int first_column) : params_(params), first_column_(first_column) {}

  // `partial_row` is a row of partial_out, or -1 where the results are final.
  MLA_DEVICE OutputTarget find_rows(int sequence, int partial_row) const {
    OutputTarget target;
    const Queries queries(params_, sequence);
    const Heads heads(params_);
    target.partial = partial_row >= 0;
    if (target.partial) {
      const int64_t first = static_cast<int64_t>(partial_row) * Traits::Problem::rows(params_);
      target.begin = reinterpret_cast<char*>(params_.partial_out + first * Traits::HEAD_DIM_V + first_column_);
      target.lse = params_.partial_lse + first;
    } else {
      target.begin =
          static_cast<char*>(params_.out) + 2 * (queries.first_token * params_.out_token_stride + first_column_);
      target.lse = params_.lse + lse_of_token(params_, queries.first_token);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const QueryRow row(heads, queries, first_row() + stored_row(i));
      const uint32_t of_token = static_cast<uint32_t>(params_.out_token_stride >> 3);
      const uint32_t of_head = static_cast<uint32_t>(params_.out_head_stride >> 3);
      target.offset[i] = target.partial ? static_cast<uint32_t>(row.index) * (Traits::HEAD_DIM_V / 4)
                                        : row.token * of_token + row.head * of_head;
      if (!row.valid) target.offset[i] = NO_ROW;
    }
    return target;
  }

  // Stores the lse of this warp's rows; `from` is where the block's 64 lse lie in shared memory. Lane i of the first 16
  // has the warp's row i, and learns whether there is one from a lane that stores the row's columns.
  MLA_DEVICE void store_lse(const OutputTarget& target, uint32_t from) const {
    const int lane = warpgroup_thread() % 32;
    uint32_t offset = NO_ROW;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t of_row = __shfl_sync(~0u, target.offset[i], lane % 4 * 8);
      if (lane / 4 == i) offset = of_row;
    }
    if (offset == NO_ROW) return;
    const int row = warpgroup_thread() / 32 * 16 + lane;
    float lse = ld_shared<float>(from + row * 4);
    int64_t at = first_row() + row;
    if (!target.partial) {
      at = lse_of_row_at(params_, first_row() + row);
      if (lse == -INFINITE) lse = params_.empty_lse;
    }
    store_global(target.lse[at], lse);
  }

  // Stores all columns. `tile(i, four)` gives this thread's final values of tile i; it is called in the order of i.
  //
  // A store takes one clock for each line of memory it touches, and a quad holds at most 32 contiguous bytes of a row.
  // So a warp's 16 rows go through its `buffer` in shared memory, 128 bytes of each at a time, and leave in whole
  // lines.
  template <class Tile>
  MLA_DEVICE void store(uint32_t buffer, const OutputTarget& target, const Tile& tile) const {
    if (target.partial)
      by_pieces<COLUMNS * 4 / 128, 2>(buffer, target, [&](int piece, uint32_t to) { stage_fp32(piece, to, tile); });
    else
      by_pieces<COLUMNS * 2 / 128, 1>(buffer, target, [&](int piece, uint32_t to) { stage_16(piece, to, tile); });
  }

  // Stores zeros, for a work tile without keys.
  MLA_DEVICE void store_zeros(const OutputTarget& target) const {
    const int pieces = COLUMNS * (target.partial ? 4 : 2) / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (target.offset[i] != NO_ROW)
#pragma unroll 1
        for (int at = warpgroup_thread() % 8; at < pieces; at += 8)
          store_global(reinterpret_cast<uint4*>(target.begin)[target.offset[i] + at], make_uint4(0, 0, 0, 0));
  }

 private:
  MLA_DEVICE static int stored_row(int i) {
    return warpgroup_thread() / 32 * 16 + i * 4 + warpgroup_thread() % 32 / 8;
  }

  // Each piece is written to shared memory while the one before is carried to global memory. PAIRS is 2 where the
  // swizzle moves positions by twice the row, else 1.
  template <int COUNT, int PAIRS, class Stage>
  MLA_DEVICE void by_pieces(uint32_t buffer, const OutputTarget& target, const Stage& stage) const {
    stage(0, buffer);
#pragma unroll
    for (int piece = 0; piece < COUNT; ++piece)
      carry<PAIRS>(piece, buffer + piece % PIECES * PIECE_BYTES, target, [&] {
        if (piece + 1 < COUNT) stage(piece + 1, buffer + (piece + 1) % PIECES * PIECE_BYTES);
      });
  }

  // 64 columns in 16 bits. The i-th 16 bytes of row r lie at position i ^ r % 8, so that writes and reads use all
  // banks.
  template <class Tile>
  MLA_DEVICE static void stage_16(int piece, uint32_t to, const Tile& tile) {
    const int lane = warpgroup_thread() % 32;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float values[4];
        tile(piece * 8 + pair * 2 + i, values);
        four[2 * i] = pack_pair<Element>(values[0], values[1]);
        four[2 * i + 1] = pack_pair<Element>(values[2], values[3]);
      }
      const uint32_t position = lane % 16 * 128 + ((pair * 2 + lane / 16) ^ lane % 8) * 16;
      stmatrix_x4(to + position, four[0], four[1], four[2], four[3]);
    }
  }

  // 32 columns in fp32. The i-th 16 bytes of row r lie at position i ^ r % 4 * 2. A lane's second row is 8 rows, or
  // 1,024 bytes, behind its first.
  template <class Tile>
  MLA_DEVICE static void stage_fp32(int piece, uint32_t to, const Tile& tile) {
    const int lane = warpgroup_thread() % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[4];
      tile(piece * 4 + i, values);
      const uint32_t position = lane / 4 * 128 + ((i * 2 + lane % 4 / 2) ^ lane / 4 % 4 * 2) * 16 + lane % 2 * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        st_shared_v2(to + position + half * 1024, values[2 * half], values[2 * half + 1]);
    }
  }

  // Carries a piece from shared to global memory, four rows at a time; `meanwhile` runs while they are read, or
  // afterwards: ClusterMode::LATE_EPILOGUE says why, and FOLDS lacks registers, too.
  template <int PAIRS, class Meanwhile>
  MLA_DEVICE void carry(int piece, uint32_t from, const OutputTarget& target, const Meanwhile& meanwhile) const {
    constexpr bool LATE = Traits::Cluster::LATE_EPILOGUE || Traits::FOLDS;
    static_assert(LATE || PIECES > 1, "a piece that is early needs a buffer of its own");
    const int lane = warpgroup_thread() % 32;
    uint4 columns[4];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      const uint32_t position = row * 128 + (lane % 8 ^ row * PAIRS % 8) * 16;
      ld_shared_v4(from + position, columns[i].x, columns[i].y, columns[i].z, columns[i].w);
    }
    if constexpr (!LATE) meanwhile();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (target.offset[i] != NO_ROW)
        store_global(reinterpret_cast<uint4*>(target.begin)[target.offset[i] + (piece * 8 + lane % 8)], columns[i]);
    if constexpr (PIECES == 1) __syncwarp();  // all lanes have read
    if constexpr (LATE) meanwhile();
  }

  // Relaxed where a streaming combine may be loading the same words of a partial.
  template <class Words>
  MLA_DEVICE static void store_global(Words& to, const Words& words) {
    if constexpr (Traits::STREAMABLE)
      st_relaxed_gpu(&to, words);
    else
      to = words;
  }

  const Params& params_;
  int first_column_;
};

}  // namespace mla::sm_90
