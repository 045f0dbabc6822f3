// The largest scaled score of every row, which FlashMLA's prefill returns. The running max of the softmax is not it: that
// is raised only now and then.
#pragma once

#include "sm_90/decode/shared_storage.hpp"
#include "sm_90/decode/softmax.hpp"

namespace mla::sm_90 {

// For kernels that never return them.
template <class Traits, bool RETURNED>
struct MaxLogits {
  MLA_DEVICE static void begin_tile(uint32_t) {}
  MLA_DEVICE static void add(uint32_t, const float (&)[SCORES]) {}
  MLA_DEVICE static void publish(const typename Traits::Params&, uint32_t, uint32_t) {}
  MLA_DEVICE static void publish_none(uint32_t) {}
  MLA_DEVICE static void store(const typename Traits::Params&, uint32_t) {}
};

// For kernels that return them. QK collects them in shared memory, two of a thread, because it has
// no registers left, and publishes them with the reciprocal denominators; a PV warpgroup stores them. Every tile of a
// query token raises what lies in global memory, which is -inf before the first, so it does not matter how many tiles
// the token has, and in which order they end. `shared` is where the block's memory begins.
template <class Traits>
struct MaxLogits<Traits, true> {
  using Params = typename Traits::Params;
  using Storage = SharedStorage<Traits>;

  MLA_DEVICE static void begin_tile(uint32_t shared) { write(shared, -INFINITE, -INFINITE); }

  // Takes the scores of a stage, after masks. It stands behind the exponentials, between which the compiler then puts it.
  MLA_DEVICE static void add(uint32_t shared, const float (&s)[SCORES]) {
    float first, second;
    read(shared, first, second);
    write(shared, fmaxf(first, largest(s, 0)), fmaxf(second, largest(s, 1)));
  }

  // Writes those of a tile to the P stage that finishes it, which has no factors.
  MLA_DEVICE static void publish(const Params& params, uint32_t shared, uint32_t p_stage) {
    float first, second;
    read(shared, first, second);
    first = quad_max(first) * params.softmax_scale;
    second = quad_max(second) * params.softmax_scale;
    if (warpgroup_thread() % 4 != 0) return;
    st_shared(p_stage + Storage::P_FACTOR + quad_row() * 4, first);
    st_shared(p_stage + Storage::P_FACTOR + quad_row() * 4 + 32, second);
  }

  // The same for a tile without keys.
  MLA_DEVICE static void publish_none(uint32_t p_stage) {
    if (warpgroup_thread() < BLOCK_M) st_shared(p_stage + Storage::P_FACTOR + warpgroup_thread() * 4, -INFINITE);
  }

  // Raises what is stored for the rows of the tile, 16 of each warp, that the P stage finishes.
  MLA_DEVICE static void store(const Params& params, uint32_t p_stage) {
    const int row = warpgroup_thread() / 32 * 16 + warpgroup_thread() % 32;
    if (warpgroup_thread() % 32 >= 16 || first_row() + row >= params.heads) return;
    const int64_t token = ld_shared<int>(p_stage + Storage::P_SEQUENCE);
    const float logit = ld_shared<float>(p_stage + Storage::P_FACTOR + row * 4);
    red_max_global(params.max_logits + token * params.heads + first_row() + row, logit);
  }

 private:
  // As `largest_score`, with fewer steps one after the other.
  MLA_DEVICE static float largest(const float (&s)[SCORES], int half) {
    float pair[SCORES / 4];
#pragma unroll
    for (int i = 0; i < SCORES / 4; ++i) pair[i] = fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]);
    return fmaxf(fmaxf(pair[0], pair[1]), fmaxf(pair[2], pair[3]));
  }
  MLA_DEVICE static uint32_t own(uint32_t shared) { return shared + Traits::ROW_MAXIMA + warpgroup_thread() * 8; }
  MLA_DEVICE static void read(uint32_t shared, float& first, float& second) {
    ld_shared_v2(own(shared), first, second);
  }
  MLA_DEVICE static void write(uint32_t shared, float first, float second) { st_shared_v2(own(shared), first, second); }
};

template <class Traits>
using MaxLogitsOf = MaxLogits<Traits, Traits::RETURNS_MAX_LOGITS>;

}  // namespace mla::sm_90
