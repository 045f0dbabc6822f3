// What threads do with scores: powers of two, and what the four lanes of a quad, which share rows, have in common.
#pragma once

#include "sm_90/mbarrier.hpp"
#include "sm_90/policy.hpp"

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

// The log-sum-exp of a row's scores, from the reference that was subtracted and the sum of what is left: -inf without
// keys. NaN stays NaN.
MLA_DEVICE float lse_of_row(float reference, float sum) {
  return sum != 0.0f ? (reference + __log2f(sum)) * LN2 : -INFINITE;
}

// What the sink of this thread's first or second row adds to such a sum.
template <class Params>
MLA_DEVICE float sink_part(const Params& params, int half, float reference) {
  const int row = first_row() + quad_row() + half * 8;
  return exp2_fast(__ldg(params.attn_sink + row % params.heads) * LOG2E - reference);
}

MLA_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
MLA_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace mla::sm90
