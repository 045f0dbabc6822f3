// Softmax arithmetic in base 2, and reductions over a quad: the four lanes that share the rows of an accumulator.
#pragma once

#include "common/logarithm.hpp"
#include "sm_90/decode/traits.hpp"
#include "sm_90/ptx/convert.hpp"
#include "sm_90/ptx/math.hpp"

namespace mla::sm_90 {

constexpr float INFINITE = __builtin_huge_valf();
// A row's running max is raised only when a thread's P of the row, summed over the keys of one stage, exceeds this.
// Until then P may exceed 1, which costs a floating-point format nothing, no max is computed and O is not rescaled.
constexpr float RESCALE_THRESHOLD = 256.0f;
constexpr float MIN_SCALE = 1e-30f;  // stands for a scale of 0, where a masked score of -inf times it would be NaN
constexpr float LOWEST = -1e38f;  // the running max of a row that has seen no key

// MIN_SCALE instead of 0. A NaN stays one, so that it reaches the results.
MLA_DEVICE float nonzero_scale(float scale) { return scale < MIN_SCALE ? MIN_SCALE : scale; }

// The first of a lane's two accumulator rows within the block; the second is 8 further on.
MLA_DEVICE int quad_row() { return warpgroup_thread() / 32 * 16 + warpgroup_thread() % 32 / 4; }

// The natural log-sum-exp of a row from its running max and sum; -inf for a row without keys. NaN stays NaN.
MLA_DEVICE float lse_of_row(float row_max, float sum) {
  return sum != 0.0f ? (row_max + __log2f(sum)) * LN_2 : -INFINITE;
}

// The term that the attention sink adds to the sum of this thread's first or second row.
template <class Params>
MLA_DEVICE float sink_term(const Params& params, int half, float row_max) {
  const int row = first_row() + quad_row() + half * 8;
  return exp2_approx(__ldg(params.attn_sink + row % params.heads) * LOG2_E - row_max);
}

MLA_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
MLA_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The scores of a stage that a thread holds: score i is of its first row, or its second where i / 2 is odd, and of the
// stage's key `key_of_score(i)`.
constexpr int SCORES = BLOCK_N / 2;
MLA_DEVICE int key_of_score(int i) { return i / 4 * 8 + warpgroup_thread() % 4 * 2 + i % 2; }

// Scores of keys at or behind a row's limit become -inf; `first` is the stage's first key.
MLA_DEVICE void mask_unseen(float (&s)[SCORES], int first, const int (&key_limit)[2]) {
#pragma unroll
  for (int i = 0; i < SCORES; ++i) {
    const int key = first + key_of_score(i);
    if (key >= key_limit[i / 2 % 2]) s[i] = -INFINITE;
  }
}

// Scores of this thread's first or second row become -inf where the key's bit is not set.
MLA_DEVICE void mask_absent(float (&s)[SCORES], uint32_t present, int half) {
  const uint32_t mine = present >> (warpgroup_thread() % 4 * 2);
#pragma unroll
  for (int i = 0; i < SCORES; ++i)
    if (i / 2 % 2 == half && (mine >> (i / 4 * 8 + i % 2) & 1) == 0) s[i] = -INFINITE;
}

// Scores of selected keys that are absent become -inf; `present` has a bit for each key of the stage.
MLA_DEVICE void mask_absent(float (&s)[SCORES], uint32_t present) {
  if (present == ~0u) return;
  mask_absent(s, present, 0);
  mask_absent(s, present, 1);
}

// P = 2^(S * its row's scale - running max), packed, and its sum over this thread's keys for each of its rows.
template <class Element>
MLA_DEVICE void exponentiate(const float (&s)[SCORES], float first_scale, float second_scale,
                             const float (&row_max)[2], uint32_t (&p)[SCORES / 2], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < SCORES / 2; ++i) {
    const float scale = i % 2 == 0 ? first_scale : second_scale;
    const float a = exp2_approx(fmaf(s[2 * i], scale, -row_max[i % 2]));
    const float b = exp2_approx(fmaf(s[2 * i + 1], scale, -row_max[i % 2]));
    sum[i % 2] = i < 2 ? a + b : sum[i % 2] + (a + b);
    p[i] = pack_pair<Element>(a, b);
  }
}

// The largest of this thread's scores of its first or second row.
MLA_DEVICE float largest_score(const float (&s)[SCORES], int half) {
  float largest = -INFINITE;
#pragma unroll
  for (int i = 0; i < SCORES; ++i)
    if (i / 2 % 2 == half) largest = fmaxf(largest, s[i]);
  return largest;
}

}  // namespace mla::sm_90
