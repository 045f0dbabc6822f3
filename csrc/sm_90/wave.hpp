// A warp of 32 lanes as the small kernels see it: sums and maxima over teams of lanes, broadcasts, elementary
// functions, programmatic dependence. csrc/cdna/wave.hpp has the same face.
#pragma once

#include "common/device.hpp"
#include "sm_90/mbarrier.hpp"

namespace sm_90 {

struct Wave {
  static constexpr int lanes = 32;
  // combine: a merge behind decode finds its partials in L2, and waits for one access to it instead of two.
  static constexpr bool reads_early = true;

  // A value that is the same in all lanes of the warp.
  MLA_DEVICE static int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  // Parameters lie in constant memory, which is read as an operand: nothing is gained by reading them again.
  template <class Params>
  MLA_DEVICE static const Params& again(const Params& p) { return p; }

  // These words are known from here on; of parameters, 64 bytes around each are in the constant cache. What is first
  // wanted behind a wait would be waited for in its turn.
  template <class... Words>
  MLA_DEVICE static void want(Words... words) {
    (want_word(words), ...);
  }

  // The line that holds an address is on its way to L1.
  MLA_DEVICE static void want_line(const int32_t* address) { mla::sm90::load_line(address); }

  // The value of lane `source` (0..31, any lane may ask for another).
  MLA_DEVICE static int from_lane(int x, int source) { return __shfl_sync(~0u, x, source); }

  // What lane `index` of this lane's team of `team` neighbouring lanes holds; `index` is the same in the whole team.
  // Only the team need be together here.
  template <int team>
  MLA_DEVICE static float from_team(float x, int lane, int index) {
    return __shfl_sync(members<team>(lane), x, index, team);
  }

  // Maximum and sum over each team of 1, 2, 4, .. 32 neighbouring lanes, the same bits in all of them.
  template <int team>
  MLA_DEVICE static int max_over(int x, int lane) {
    return __reduce_max_sync(members<team>(lane), x);
  }
  template <int team>
  MLA_DEVICE static float sum_over(float x, int lane) {
    for (int apart = 1; apart < team; apart *= 2) x += __shfl_xor_sync(members<team>(lane), x, apart);
    return x;
  }

  // 2^x, denormal results included.
  MLA_DEVICE static float exp2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  MLA_DEVICE static float log2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  MLA_DEVICE static float reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  // The same value; here NaN is honoured and nothing need be hidden.
  MLA_DEVICE static float opaque(float x) { return x; }
  MLA_DEVICE static float not_a_number() { return mla::bit_cast<float>(0x7fc00000); }

  // Two values rounded to nearest even, the first in the low half; a NaN stays a NaN.
  MLA_DEVICE static uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  MLA_DEVICE static uint32_t pack_fp16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }

  MLA_DEVICE static float fp16_value(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }

  // a * b and a - b, each rounded: never fused with what follows.
  MLA_DEVICE static float product(float a, float b) { return __fmul_rn(a, b); }
  MLA_DEVICE static float difference(float a, float b) { return __fsub_rn(a, b); }

  // True in every lane when it holds in any.
  MLA_DEVICE static bool any(bool condition) { return __any_sync(~0u, condition) != 0; }

  // In how many lanes it holds, and in how many before this one. All lanes must call.
  MLA_DEVICE static int count(bool condition) { return __popc(__ballot_sync(~0u, condition)); }
  MLA_DEVICE static int count_before(bool condition, int lane, int& all) {
    const unsigned lanes_with = __ballot_sync(~0u, condition);
    all = __popc(lanes_with);
    return __popc(lanes_with & ((1u << lane) - 1u));
  }

  // Puts a value in a word of shared memory and returns what was there, as one step.
  MLA_DEVICE static int exchange(int* word, int value) { return atomicExch(word, value); }

  // Sets bits of a word of shared memory, as one step.
  MLA_DEVICE static void set_bits(int* word, int bits) { atomicOr(word, bits); }

  // Under programmatic dependent launch: nothing the kernel before wrote may be read before the first; the kernel after
  // may be scheduled once every block has passed the second. Without such a launch both do nothing.
  MLA_DEVICE static void wait_for_producer() { mla::sm90::wait_for_turn(); }
  MLA_DEVICE static void release_consumer() { mla::sm90::give_turn(); }

 private:
  template <class Word>
  MLA_DEVICE static void want_word(Word word) {
    asm volatile("" ::"l"(word) : "memory");
  }

  template <int team>
  MLA_DEVICE static unsigned members(int lane) {
    if constexpr (team == lanes) return ~0u;
    return ((1u << team % 32) - 1u) << (lane & ~(team - 1));
  }
};

}  // namespace sm_90
