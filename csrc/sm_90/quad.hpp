// What threads do with scores: powers of two, and what the four lanes of a quad, which share rows, have in common.
#pragma once

#include "sm_90/mbarrier.hpp"

namespace mla::sm90 {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float INFINITE = __builtin_huge_valf();

MLA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A quad's first row of a block's products; the second is 8 further on.
MLA_DEVICE int quad_row() { return group_thread() / 32 * 16 + group_thread() % 32 / 4; }

MLA_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
MLA_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace mla::sm90
