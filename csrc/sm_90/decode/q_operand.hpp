// Q as the first operand of Q K^T: the first steps read it from shared memory, swizzled as it came, the others from
// registers. The second operand is a stage of keys of the same type.
#pragma once

#include "sm_90/decode/scaled_queries.hpp"
#include "sm_90/decode/traits.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/wgmma.hpp"

namespace mla::sm_90 {

// Which bytes of a step this lane takes; found once for all steps.
struct QPlace {
  int row;         // of the block
  uint32_t piece;  // where the swizzle puts the lane's 16 bytes of an even step
  MLA_DEVICE QPlace() {
    const int lane = warpgroup_thread() % 32;
    const int warp = warpgroup_thread() / 32;
    row = warp * 16 + lane % 16;
    piece = lane / 16 ^ (row / 2 & 3);
  }
};

template <class Traits>
class QOperand {
  using Element = typename Traits::Element;

 public:
  // Takes one half of this warpgroup's 64 rows from the stage that it came in, in boxes of `box` bytes, to registers or
  // to `shared`; with SCALES_Q times the powers of two of this lane's rows.
  MLA_DEVICE void take(const QPlace& place, int half, uint32_t stage, int box, uint32_t shared,
                       const float (&power)[2]) {
    constexpr int HALF = 2 * Traits::Q_BOXES;
#pragma unroll
    for (int k = half * HALF; k < half * HALF + HALF && k < Traits::Q_STEPS; ++k) {
      const uint32_t from = stage + k % HALF / 2 * box;
      // Two steps make a box. It is copied in two pieces of 2 KiB, however many of its rows there are.
      if (Traits::SCALES_Q && k < Traits::Q_SHARED_STEPS) {
        ScaledQueries::convert(shared + k / 2 * Traits::Q_BOX_BYTES, from, k % 2, power[k % 2]);
      } else if (k < Traits::Q_SHARED_STEPS) {
        uint32_t words[4];
        ld_shared_v4(from + k % 2 * 2048 + warpgroup_thread() * 16, words);
        st_shared_v4(shared + k * 2048 + warpgroup_thread() * 16, words[0], words[1], words[2], words[3]);
      } else {
        ldmatrix_x4(from + place.row * 64 + (place.piece ^ k % HALF % 2 * 2) * 16,
                    &steps_[4 * (k - Traits::Q_SHARED_STEPS)]);
        if constexpr (Traits::SCALES_Q) ScaledQueries::convert_step(&steps_[4 * (k - Traits::Q_SHARED_STEPS)], power);
      }
    }
  }

  // Of the steps in shared memory. The address is opaque, or the compiler would keep the descriptors in registers that
  // it does not have.
  MLA_DEVICE static uint64_t descriptor(uint32_t shared) {
    pin_registers(shared);
    return make_descriptor(warp_uniform(shared), 0, 512, Swizzle::bytes64);
  }

  // A stage's keys, and those of a step.
  MLA_DEVICE static uint64_t keys(uint32_t stage) {
    return make_descriptor(stage, 0, Traits::GROUP_BYTES, Swizzle::bytes128);
  }
  MLA_DEVICE static uint64_t key(uint64_t keys, int k) {
    return advance_descriptor(keys, k / 4 * Traits::BLOCK_BYTES + k % 4 * 32);
  }

  // Issues step k of S = Q K^T.
  MLA_DEVICE void multiply(int k, float (&s)[BLOCK_N / 2], uint64_t q, uint64_t key) const {
    if (k < Traits::Q_SHARED_STEPS)
      qk_mma<Element>(s, advance_descriptor(q, k / 2 * Traits::Q_BOX_BYTES + k % 2 * 32), key, k > 0);
    else
      qk_mma<Element>(s, &steps_[4 * (k - Traits::Q_SHARED_STEPS)], key, true);
  }

 private:
  uint32_t steps_[Traits::Q_REGISTER_STEPS * 4];
};

}  // namespace mla::sm_90
