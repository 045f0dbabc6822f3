// Queries of sparse decode with keys as the first operand: from the boxes that TMA brings to the order and swizzle in
// which Q^T is multiplied, in the same place.
//
// A lane of S^T reads 16 bytes of a key at a time. Of e4m3 these are four of its values in each of four steps: position
// 16j + 8h + 2t + b of 64 columns holds column 16t + 4j + 2h + b, for t, j < 4 and h, b < 2. Of bf16 they are four of
// its values in each of two steps: position 32i + 16j + 8h + 2t + b holds column 32i + 8t + 4j + 2h + b.
#pragma once

#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/sparse_decode/swap_ab/shared_storage.hpp"

namespace mla::sm_90 {

template <class Traits>
class SparseSwapAbQueries {
  using Storage = SharedStorage<Traits>;
  static constexpr int BLOCKS = Traits::COLUMN_BLOCKS;
  static constexpr int PIECES = Traits::ROWS * BLOCKS * 8;  // of 16 bytes
  static constexpr int OWN_PIECES = (PIECES + Traits::CONSUMERS - 1) / Traits::CONSUMERS;

 public:
  // Called by all threads that multiply, those of warpgroup `group` among them, when the boxes have come. Rows behind the
  // last head become zeros.
  MLA_DEVICE static void arrange(uint32_t shared, int group, int heads) {
    const uint32_t thread = group * 128 + warpgroup_thread();
    const uint32_t box_rows = (heads + 7) / 8 * 8;
    const uint32_t q = shared + Storage::Q;
    uint32_t words[OWN_PIECES][4];
#pragma unroll
    for (int i = 0; i < OWN_PIECES; ++i) {
      const uint32_t number = thread + i * Traits::CONSUMERS, row = number % Traits::ROWS, piece = number / Traits::ROWS;
#pragma unroll
      for (int word = 0; word < 4; ++word) words[i][word] = 0;
      if (number < PIECES && static_cast<int>(row) < heads) {
        const uint32_t at = q + (piece / 4 * box_rows + row) * 64 + piece % 4 * 16;
        ld_shared_v4(at ^ (at >> 7 & 3) << 4, words[i]);  // the 64-byte swizzle
      }
    }
    named_barrier_sync<PV_BARRIER, Traits::CONSUMERS>();
#pragma unroll
    for (int i = 0; i < OWN_PIECES; ++i) {
      const uint32_t number = thread + i * Traits::CONSUMERS, row = number % Traits::ROWS, piece = number / Traits::ROWS;
      if (number >= PIECES) break;
      const uint32_t block = piece / 8, eight = piece % 8;
      const bool rope = block == BLOCKS - 1;
      const uint32_t to = q + block * Traits::Q_BLOCK_BYTES + row * 128 + (rope ? eight % 4 : eight / 2) * 4;
      const uint32_t first = (rope ? eight / 4 : eight % 2) * 4;
#pragma unroll
      for (uint32_t pair = 0; pair < 4; ++pair) st_shared(to + (((first + pair) ^ row % 8) << 4), words[i][pair]);
    }
    fence_proxy_async();
    named_barrier_sync<PV_BARRIER, Traits::CONSUMERS>();
  }
};

}  // namespace mla::sm_90
