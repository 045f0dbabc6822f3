// Loads of 8 bytes and transposed matrices on a CPU.
#pragma once

#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

inline void ld_shared_v2(uint32_t from, uint32_t (&to)[2]) { std::memcpy(to, shared_at(from, 8), 8); }

// Row r of a matrix goes where lane r of its eight says; its element e is column r of register row e.
inline void stmatrix_trans_x4(uint32_t to, const uint32_t (&matrices)[4]) {
  const int lane = current % 32;
  uint16_t row[8];
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint64_t* words = meet_warp(matrices[matrix]);
    if (lane / 8 != matrix) continue;
    for (int e = 0; e < 8; ++e) row[e] = static_cast<uint16_t>(words[e * 4 + lane % 8 / 2] >> lane % 2 * 16);
  }
  std::memcpy(shared_at(to, 16), row, 16);
  __syncwarp();
}

}  // namespace mla::sm_90
