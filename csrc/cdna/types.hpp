// Vectors as the CDNA instructions take them, and the lane's place in its wave.
#pragma once

#include "mla/device.hpp"

namespace cdna {

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef uint32_t u32x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));

constexpr int WAVE = 64;

// The lane map of a 16x16 matrix operand: `column` 0..15 is its row or column, `group` 0..3 its four-element slice of
// the contracted dimension (operands) or its four rows (accumulator).
struct Lane {
  int index;    // 0..63
  int column;   // index % 16
  int group;    // index / 16

  MLA_DEVICE static Lane current() {
    const int index = static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)));
    return Lane{index, index & 15, index >> 4};
  }
};

// x, computed from here on: what is derived from it is not kept in registers across a loop that rarely needs it.
MLA_DEVICE int rederived(int x) {
  asm volatile("" : "+v"(x));
  return x;
}

// The wave's number in its workgroup, known to the compiler as the same in all lanes.
MLA_DEVICE int wave_id() { return __builtin_amdgcn_readfirstlane(mla::thread_id() / WAVE); }

}  // namespace cdna
