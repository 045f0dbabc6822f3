// How a values warpgroup's 64 rows of 256 columns get to memory: as results in 16 bits, or as partials in fp32.
#pragma once

#include "sm_90/awaited.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/quad.hpp"
#include "sm_90/shared_copies.hpp"
#include "sm_90/work.hpp"

namespace mla::sm90 {

// Where this warp's rows go: a lane stores 16 bytes at a time, of every fourth row. And what the values of the lane's
// rows of O, which are other rows, are multiplied by on their way: the reciprocal denominators, or what a cut counts.
struct Ending {
  bool partial;
  float* lse;          // of the block's rows
  char* begin;         // of the sequence's rows
  uint32_t offset[4];  // from `begin`, in units of 16 bytes; NO_ROW where there is no row
  float factor[2];
};
constexpr uint32_t NO_ROW = ~0u;

// What a values thread holds of O: tiles of 8 columns, two values of its first row and two of its second in each.
using Products = float[2][64];

// One of these tiles, each row times its factor.
MLA_DEVICE void scaled_tile(const Products& o, int tile, const float (&factor)[2], float (&four)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = o[tile / 16][tile % 16 * 4 + i] * factor[i / 2];
}

template <class Policy>
class Results {
  using T = typename Policy::Type;
  using Params = typename Policy::Params;
  static constexpr int COLUMNS = Policy::STORED_COLUMNS;

 public:
  // Of the columns from `first_column` on.
  MLA_DEVICE Results(const Params& params, int first_column) : params_(params), first_column_(first_column) {}

  // `partial_row` is that of all partials, or -1 where the results are whole.
  MLA_DEVICE Ending find_rows(int sequence, int partial_row) const {
    Ending ending;
    const Queries queries(params_, sequence);
    const Heads heads(params_);
    ending.partial = partial_row >= 0;
    if (ending.partial) {
      const int64_t first = static_cast<int64_t>(partial_row) * Policy::rows(params_);
      ending.begin = reinterpret_cast<char*>(params_.partial_out + first * D_V + first_column_);
      ending.lse = params_.partial_lse + first + first_row();
    } else {
      ending.begin =
          static_cast<char*>(params_.out) + 2 * (queries.first_token * params_.out_token_stride + first_column_);
      ending.lse = params_.lse + queries.first_token * params_.heads + first_row();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Row mine(heads, queries, first_row() + stored_row(i));
      const uint32_t of_token = static_cast<uint32_t>(params_.out_token_stride >> 3);
      const uint32_t of_head = static_cast<uint32_t>(params_.out_head_stride >> 3);
      ending.offset[i] = ending.partial ? mine.index * (D_V / 4) : mine.token * of_token + mine.head * of_head;
      if (!mine.valid) ending.offset[i] = NO_ROW;
    }
    return ending;
  }

  // The lse of this warp's rows, from where those of the block's rows lie in shared memory.
  MLA_DEVICE void store_lse(const Ending& ending, uint32_t from) const {
    if (group_thread() % 8 != 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (ending.offset[i] != NO_ROW)
        put_in_memory(ending.lse[stored_row(i)], load_shared<float>(from + stored_row(i) * 4));
  }

  static constexpr int PIECE_BYTES = 16 * 128;        // of a warp's rows
  static constexpr int ROOM_BYTES = 2 * PIECE_BYTES;  // of a warp: one piece is written while another is read

  // All columns. `tile(i, four)` gives this thread's values of tile i, finished. It is called in order of i.
  //
  // A store takes one clock for each line of memory it touches, and a quad holds at most 32 contiguous bytes of a row.
  // So a warp's 16 rows go through shared memory, its `room`, 128 bytes of each at a time, and leave in whole lines.
  template <class Tile>
  MLA_DEVICE void store(uint32_t room, const Ending& ending, const Tile& tile) const {
    if (ending.partial)
      by_pieces<COLUMNS * 4 / 128, 2>(room, ending, [&](int piece, uint32_t to) { put_fp32(piece, to, tile); });
    else
      by_pieces<COLUMNS * 2 / 128, 1>(room, ending, [&](int piece, uint32_t to) { put_16(piece, to, tile); });
  }

  // The same of an item without keys.
  MLA_DEVICE void store_zeros(const Ending& ending) const {
    const int pieces = COLUMNS * (ending.partial ? 4 : 2) / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (ending.offset[i] != NO_ROW)
#pragma unroll 1
        for (int at = group_thread() % 8; at < pieces; at += 8)
          put_in_memory(reinterpret_cast<uint4*>(ending.begin)[ending.offset[i] + at], make_uint4(0, 0, 0, 0));
  }

 private:
  MLA_DEVICE static int stored_row(int i) { return group_thread() / 32 * 16 + i * 4 + group_thread() % 32 / 8; }

  // Each piece is put to shared memory while the one before is carried to memory. `PAIRS` is 2 where the swizzle moves
  // places by twice the row, else 1.
  template <int PIECES, int PAIRS, class Put>
  MLA_DEVICE void by_pieces(uint32_t room, const Ending& ending, const Put& put) const {
    put(0, room);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
      carry<PAIRS>(piece, room + piece % 2 * PIECE_BYTES, ending, [&] {
        if (piece + 1 < PIECES) put(piece + 1, room + (piece + 1) % 2 * PIECE_BYTES);
      });
  }

  // 64 columns in 16 bits. The i-th 16 bytes of row r lie at place i ^ r % 8, so that writes and reads use all banks.
  template <class Tile>
  MLA_DEVICE static void put_16(int piece, uint32_t to, const Tile& tile) {
    const int lane = group_thread() % 32;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float values[4];
        tile(piece * 8 + pair * 2 + i, values);
        four[2 * i] = pack<T>(values[0], values[1]);
        four[2 * i + 1] = pack<T>(values[2], values[3]);
      }
      const uint32_t place = lane % 16 * 128 + ((pair * 2 + lane / 16) ^ lane % 8) * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + place), "r"(four[0]),
                   "r"(four[1]), "r"(four[2]), "r"(four[3])
                   : "memory");
    }
  }

  // 32 columns in fp32. The i-th 16 bytes of row r lie at place i ^ r % 4 * 2.
  template <class Tile>
  MLA_DEVICE static void put_fp32(int piece, uint32_t to, const Tile& tile) {
    const int lane = group_thread() % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[4];
      tile(piece * 4 + i, values);
      const uint32_t place = lane / 4 * 128 + ((i * 2 + lane % 4 / 2) ^ lane / 4 % 4 * 2) * 16 + lane % 2 * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + place + half * 1024), "f"(values[2 * half]),
                     "f"(values[2 * half + 1])
                     : "memory");
    }
  }

  // Whether the next piece is put only when this one is on its way: earlier would take registers that pairs lack; and
  // what the other block sends may still have to come.
  static constexpr bool LATE = Policy::PAIRED || Policy::TWO_CUTS;

  // A piece from shared memory to memory, four rows at a time; `meanwhile` runs while they are read, or afterwards.
  template <int PAIRS, class Meanwhile>
  MLA_DEVICE void carry(int piece, uint32_t from, const Ending& ending, const Meanwhile& meanwhile) const {
    const int lane = group_thread() % 32;
    uint4 columns[4];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      const uint32_t place = row * 128 + (lane % 8 ^ row * PAIRS % 8) * 16;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(columns[i].x), "=r"(columns[i].y), "=r"(columns[i].z), "=r"(columns[i].w)
                   : "r"(from + place)
                   : "memory");
    }
    if constexpr (!LATE) meanwhile();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (ending.offset[i] != NO_ROW)
        put_in_memory(reinterpret_cast<uint4*>(ending.begin)[ending.offset[i] + (piece * 8 + lane % 8)], columns[i]);
    if constexpr (LATE) meanwhile();
  }

  // Combine may be loading what is a partial.
  template <class Words>
  MLA_DEVICE static void put_in_memory(Words& to, const Words& words) {
    if constexpr (Policy::AWAITABLE)
      store_arriving(&to, words);
    else
      to = words;
  }

  const Params& params_;
  int first_column_;
};

}  // namespace mla::sm90
