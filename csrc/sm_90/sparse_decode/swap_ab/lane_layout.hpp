// Which keys and columns a lane has in sparse decode with keys as the first operand; rows are those of decode.
#pragma once

#include "sm_90/decode/swap_ab/lane_layout.hpp"
#include "sm_90/sparse_decode/swap_ab/shared_storage.hpp"

namespace mla::sm_90 {

template <class Traits>
struct SparseSwapAbLayout : SwapAbLanes<Traits::ROWS> {
  static constexpr int TOKEN_BYTES = Traits::KvFormat::TOKEN_BYTES;

  // The key of a stage that row `row` of a 16 x 16 step holds. Records begin 16 bytes further in the turn of the banks
  // than the one before. Neighbouring rows of S^T hold keys 4 or 12 apart, so eight lanes which read 64 bytes of two
  // such keys read all banks; those of V^T that a lane's column reads at a time are 2 apart modulo 8, so eight lanes
  // which read 32 bytes of four of them do, too.
  MLA_DEVICE static int key_of_row(int row) {
    const int odd = row & 1;
    return ((row & 6) ^ odd << 2) | odd << 3 | row >> 3;
  }

  // Where a lane stores eight keys of a column for the second product, in the first 64 columns of a record: one of the
  // first four columns of every 16. Column 16t + 2i + h is row 8h + t of tile i; of the next 64 columns it is four rows
  // further on. A warp's 16 keys are two pieces of a row.
  MLA_DEVICE static uint32_t vt_piece(int warp) {
    const int lane = warpgroup_thread() % 32, matrix = lane / 8, t = lane % 8 / 2, h = lane % 2;
    return matrix / 2 * Traits::VT_TILE_BYTES + (8 * h + t) * 128 + ((2 * warp + matrix % 2) ^ t) * 16;
  }

  // Adds up, or takes the largest of, a value of each of the warp's 16 keys: over the lanes that have the same rows.
  MLA_DEVICE static float sum_over_keys(float x) {
#pragma unroll
    for (int lane = 4; lane < 32; lane *= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
  }
  MLA_DEVICE static float max_over_keys(float x) {
#pragma unroll
    for (int lane = 4; lane < 32; lane *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
  }
};

}  // namespace mla::sm_90
