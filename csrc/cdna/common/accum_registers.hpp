// Accumulators of matrix instructions: the register file in which the compiler keeps them, and their largest element.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

// Compilers before LLVM 22 give every product an AGPR as its result and, where two paths meet, choose a VGPR if either
// path uses the value otherwise: they then move all of the output in every iteration of the loop. Seen from the loop, a
// pinned value is only ever in an AGPR. LLVM 22 decides by itself, and worse with a hint.
MLA_DEVICE void pin_to_agpr(f32x4& x) {
#if __clang_major__ < 22
  asm volatile("" : "+a"(x));
#endif
}
// The reverse: 128 rows have 256 registers of output and need a few more for scores.
MLA_DEVICE void pin_to_vgpr(f32x4& x) {
#if __clang_major__ < 22
  asm("" : "+v"(x));
#endif
}

// Returns the largest of a lane's elements.
template <int tiles>
MLA_DEVICE float lane_max(const f32x4 (&scores)[tiles]) {
  float largest = scores[0][0];
#pragma unroll
  for (int i = 1; i < 4 * tiles; ++i) {
    const float score = scores[i / 4][i % 4];
    largest = __builtin_fmaxf(largest, score);
  }
  return largest;
}

}  // namespace cdna
