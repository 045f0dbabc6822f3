// A warp of 32 lanes as the kernels of csrc/common see it: sums and maxima over teams of lanes, broadcasts, elementary
// functions, programmatic dependent launch. csrc/cdna/common/wave.hpp has the same interface.
#pragma once

#include "common/device.hpp"
#include "sm_90/ptx/convert.hpp"
#include "sm_90/ptx/griddep.hpp"
#include "sm_90/ptx/math.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

struct Wave : RoundedApart {
  static constexpr int lanes = 32;
  static constexpr bool lse_anywhere = true;  // combine stores lse where and as its caller wants it
  // combine loads partials before it knows their weights: behind decode they lie in L2, and one round trip is saved.
  static constexpr bool reads_early = true;

  // Marks a value that is the same in all lanes of the warp.
  MLA_DEVICE static int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  // Returns the parameters. They lie in constant memory and are read as operands, so reading them again costs nothing.
  template <class Params>
  MLA_DEVICE static const Params& reread(const Params& p) { return p; }

  // Makes the compiler have these values in registers here. Otherwise it sinks the load of a parameter behind a following
  // wait.
  template <class... Words>
  MLA_DEVICE static void materialize(Words... words) {
    sm_90::materialize(words...);
  }

  // Prefetches the line that holds an address into L1.
  MLA_DEVICE static void prefetch_line(const int32_t* address) { prefetch_l1(address); }

  // The value of lane `source` (0..31); each lane may name another.
  MLA_DEVICE static int from_lane(int x, int source) { return __shfl_sync(~0u, x, source); }

  // The value of lane `index` of this lane's team of `team` neighbouring lanes; `index` is the same in the whole team.
  // Only the team must be converged.
  template <int team>
  MLA_DEVICE static float from_team(float x, int lane, int index) {
    return __shfl_sync(members<team>(lane), x, index, team);
  }

  // Maximum and sum over each team of 1, 2, 4, .. 32 neighbouring lanes. All of them get the same bits.
  template <int team>
  MLA_DEVICE static int max_over(int x, int lane) {
    return __reduce_max_sync(members<team>(lane), x);
  }
  template <int team>
  MLA_DEVICE static int sum_over(int x, int lane) {
    return __reduce_add_sync(members<team>(lane), x);
  }
  template <int team>
  MLA_DEVICE static float sum_over(float x, int lane) {
    for (int apart = 1; apart < team; apart *= 2) x += __shfl_xor_sync(members<team>(lane), x, apart);
    return x;
  }

  // 2^x, denormal results included.
  MLA_DEVICE static float exp2(float x) { return exp2_with_denormals(x); }
  MLA_DEVICE static float log2(float x) { return log2_approx(x); }
  MLA_DEVICE static float reciprocal(float x) { return reciprocal_approx(x); }

  // The same value: this compiler honours NaN, so nothing must be hidden from it.
  MLA_DEVICE static float opaque(float x) { return x; }
  MLA_DEVICE static float not_a_number() { return bit_cast<float>(0x7fc00000); }

  // Two values rounded to nearest even, the first in the low half; a NaN stays a NaN.
  MLA_DEVICE static uint32_t pack_bf16(float low, float high) { return pack_pair<bf16>(low, high); }
  MLA_DEVICE static uint32_t pack_fp16(float low, float high) { return pack_pair<fp16>(low, high); }
  MLA_DEVICE static float fp16_value(uint16_t bits) { return sm_90::fp16_value(bits); }

  // True in every lane when it holds in any.
  MLA_DEVICE static bool any(bool condition) { return __any_sync(~0u, condition) != 0; }

  // The number of lanes in which it holds, and of those before this one. All lanes must call.
  MLA_DEVICE static int count(bool condition) { return __popc(__ballot_sync(~0u, condition)); }
  MLA_DEVICE static int count_before(bool condition, int lane, int& all) {
    const unsigned lanes_with = __ballot_sync(~0u, condition);
    all = __popc(lanes_with);
    return __popc(lanes_with & ((1u << lane) - 1u));
  }

  // Atomically exchanges a word of shared memory.
  MLA_DEVICE static int exchange(int* word, int value) { return atomicExch(word, value); }

  // Atomically sets bits of a word of shared memory.
  MLA_DEVICE static void set_bits(int* word, int bits) { atomicOr(word, bits); }

  // Programmatic dependent launch: ptx/griddep.hpp.
  MLA_DEVICE static void wait_for_producer() { griddep_wait(); }
  MLA_DEVICE static void release_consumer() { griddep_launch_dependents(); }

 private:
  template <int team>
  MLA_DEVICE static unsigned members(int lane) {
    if constexpr (team == lanes) return ~0u;
    return ((1u << team % 32) - 1u) << (lane & ~(team - 1));
  }
};

}  // namespace mla::sm_90
