// Queries of e4m3 as the first operand of Q K^T, as they are stored: all steps lie in registers. The second operand is
// a stage of keys as they are stored.
#pragma once

#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/decode/q_operand.hpp"

namespace mla::sm_90 {

// The same interface as QOperand. A step is 32 values deep, and its fragments are those of 16 values of 16 bits: a lane
// has four bytes where it would have two values.
template <class Traits>
class QAsStored {
  // Half of every row comes in a stage, in rows whose pitch puts 16 bytes of eight of them into different banks.
  static constexpr int HALF_STEPS = Traits::Q_STEPS / 2, HALF_BYTES = HALF_STEPS * 32, PITCH = HALF_BYTES + 16;
  static_assert(Traits::Q_STEPS % 2 == 0 && BLOCK_M * PITCH <= Traits::STAGE_BYTES);

 public:
  // Puts half of a row where `take` finds it: every other 16 bytes from `from` on, or zeros where that is null.
  MLA_DEVICE static void put(const char* from, uint32_t stage, int row, int side) {
    constexpr int PIECES = HALF_STEPS, BATCH = 3;  // pieces whose loads are in flight at the same time
    static_assert(PIECES % BATCH == 0);
    const uint32_t to = stage + row * PITCH + side * 16;
#pragma unroll 1
    for (int first = 0; first < PIECES; first += BATCH) {
      uint32_t words[BATCH][4] = {};
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (from != nullptr) ld_global_v4(from + (first + i) * 32, words[i]);
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        st_shared_v4(to + (first + i) * 32, words[i][0], words[i][1], words[i][2], words[i][3]);
    }
  }

  MLA_DEVICE void take(const QPlace& place, int half, uint32_t stage, int, uint32_t, const float (&)[2]) {
    const uint32_t from = stage + place.row * PITCH + warpgroup_thread() % 32 / 16 * 16;
#pragma unroll
    for (int k = 0; k < HALF_STEPS; ++k) ldmatrix_x4(from + k * 32, &steps_[4 * (half * HALF_STEPS + k)]);
  }

  MLA_DEVICE static uint64_t descriptor(uint32_t) { return 0; }  // no step lies in shared memory

  MLA_DEVICE static uint64_t keys(uint32_t stage) { return make_descriptor(stage, 0, 512, Swizzle::bytes64); }
  MLA_DEVICE static uint64_t key(uint64_t keys, int k) {
    return advance_descriptor(keys, k / 2 * Traits::RAW_BLOCK_BYTES + k % 2 * 32);
  }

  MLA_DEVICE void multiply(int k, float (&s)[BLOCK_N / 2], uint64_t, uint64_t key) const {
    qk_mma_e4m3(s, &steps_[4 * k], key, k > 0);
  }

 private:
  uint32_t steps_[Traits::Q_STEPS * 4];
};

template <class Traits>
using QOperandOf = typename SelectStorage<Traits::SCORES_AS_STORED, QAsStored<Traits>, QOperand<Traits>>::Type;

}  // namespace mla::sm_90
