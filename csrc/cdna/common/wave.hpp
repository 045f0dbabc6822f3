// The wave of 64 lanes that the shared kernels (combine, plan, append_kv) are written for: sums and maxima over teams
// of lanes, broadcasts, scans, elementary functions. sm_90 has a class with the same members.
#pragma once

#include "cdna/common/kernel_params.hpp"
#include "cdna/common/types.hpp"
#include "common/device.hpp"

namespace cdna {

// `converts_bf16` says that the arch has v_cvt_pk_bf16_f32.
template <bool converts_bf16>
struct Wave {
  static constexpr int lanes = 64;
  static constexpr bool lse_anywhere = false;  // combine: lse is [tokens, heads] by strides, -inf where empty
  static constexpr bool reads_early = false;  // combine: a split of weight zero is not read

  // Returns a value that is the same in all lanes of the wave, in a scalar register.
  MLA_DEVICE static int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }

  // Reads the kernel's parameters again, so that fields that only a later part needs do not stay in scalar registers
  // until then.
  template <class Params>
  MLA_DEVICE static const Params& reread(const Params&) {
    return reread_params<Params>();
  }

  // No wait separates launch and work on AMD, so nothing need be computed or loaded ahead of one.
  template <class... Words>
  MLA_DEVICE static void materialize(Words...) {}
  MLA_DEVICE static void prefetch_line(const int32_t*) {}

  // Returns x of lane `source` (0..63), which may differ from lane to lane.
  MLA_DEVICE static int from_lane(int x, int source) { return __builtin_amdgcn_ds_bpermute(source * 4, x); }

  // Returns x of lane `index` of this lane's team of `team` neighbouring lanes; `index` is the same in the whole team.
  template <int team>
  MLA_DEVICE static float from_team(float x, int lane, int index) {
    const int bits = mla::bit_cast<int>(x);
    if constexpr (team == lanes) return mla::bit_cast<float>(__builtin_amdgcn_readlane(bits, index));
    return mla::bit_cast<float>(from_lane(bits, (lane & ~(team - 1)) + index));
  }

  // Return the maximum and the sum over each team of 1, 2, 4, .. 64 neighbouring lanes, the same bits in all of them.
  template <int team>
  MLA_DEVICE static int max_over(int x, int lane) {
    return reduce<team>(x, lane, [](int a, int b) { return a > b ? a : b; });
  }
  template <int team>
  MLA_DEVICE static int sum_over(int x, int lane) {
    return reduce<team>(x, lane, [](int a, int b) { return a + b; });
  }
  template <int team>
  MLA_DEVICE static float sum_over(float x, int lane) {
    return reduce<team>(x, lane, [](float a, float b) { return a + b; });
  }

  // Returns 2^x for x <= 0, denormal results included: v_exp_f32 alone flushes those.
  MLA_DEVICE static float exp2(float x) {
    const bool tiny = x < -100.0f;
    const float power = __builtin_amdgcn_exp2f(tiny ? x + 64.0f : x);
    return tiny ? power * 5.42101086e-20f : power;  // 2^-64
  }
  MLA_DEVICE static float log2(float x) { return __builtin_amdgcn_logf(x); }
  MLA_DEVICE static float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

  MLA_DEVICE static float opaque(float x) { return cdna::opaque(x); }
  MLA_DEVICE static float not_a_number() { return opaque(mla::bit_cast<float>(0x7fc00000)); }

  // Returns two values rounded to nearest even, the first in the low half; a NaN stays a NaN.
  MLA_DEVICE static uint32_t pack_bf16(float low, float high) {
    return static_cast<uint32_t>(bf16_bits(high)) << 16 | bf16_bits(low);
  }
  MLA_DEVICE static uint32_t pack_fp16(float low, float high) {
    const uint16_t l = mla::bit_cast<uint16_t>(static_cast<_Float16>(opaque(low)));
    const uint16_t h = mla::bit_cast<uint16_t>(static_cast<_Float16>(opaque(high)));
    return static_cast<uint32_t>(h) << 16 | l;
  }

  MLA_DEVICE static float fp16_value(uint16_t bits) { return static_cast<float>(mla::bit_cast<_Float16>(bits)); }

  // Return a * b and a - b, each rounded and never fused with a later operation.
  MLA_DEVICE static float product(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
  }
  MLA_DEVICE static float difference(float a, float b) {
#pragma clang fp contract(off)
    return a - b;
  }

  // Returns true in every lane when `condition` holds in any.
  MLA_DEVICE static bool any(bool condition) { return __builtin_amdgcn_ballot_w64(condition) != 0; }

  // Return in how many lanes `condition` holds, and in how many before this one; `all` becomes the former.
  MLA_DEVICE static int count(bool condition) { return __builtin_popcountll(__builtin_amdgcn_ballot_w64(condition)); }
  MLA_DEVICE static int count_before(bool condition, int, int& all) {
    const uint64_t lanes_with = __builtin_amdgcn_ballot_w64(condition);
    all = __builtin_popcountll(lanes_with);
    const int below = __builtin_amdgcn_mbcnt_lo(static_cast<uint32_t>(lanes_with), 0);
    return __builtin_amdgcn_mbcnt_hi(static_cast<uint32_t>(lanes_with >> 32), below);
  }

  // Exchanges a word of LDS atomically.
  MLA_DEVICE static int exchange(int* word, int value) {
    return __hip_atomic_exchange(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  }

  // Sets bits of a word of LDS atomically.
  MLA_DEVICE static void set_bits(int* word, int bits) {
    __hip_atomic_fetch_or(word, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  }

  // AMD has no programmatic dependent launch: the order of the stream is all there is, and both are empty.
  MLA_DEVICE static void wait_for_producer() {}
  MLA_DEVICE static void release_consumer() {}

 private:
  MLA_DEVICE static uint16_t bf16_bits(float x) {
    if constexpr (converts_bf16) return mla::bit_cast<uint16_t>(static_cast<__bf16>(opaque(x)));
    const uint32_t bits = mla::bit_cast<uint32_t>(opaque(x));
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
  }
  template <int control>
  MLA_DEVICE static int dpp(int x) {
    return __builtin_amdgcn_update_dpp(0, x, control, 0xf, 0xf, true);
  }
  template <class T, class Combine>
  MLA_DEVICE static T step(T x, int moved, Combine combine) {
    return combine(x, mla::bit_cast<T>(moved));
  }
  // A butterfly reduction. Within 8 and 16 lanes a mirror serves as the exchange: by then each half holds one value.
  template <int team, class T, class Combine>
  MLA_DEVICE static T reduce(T x, int lane, Combine combine) {
    if constexpr (team >= 2) x = step(x, dpp<0xb1>(mla::bit_cast<int>(x)), combine);    // quad_perm [1, 0, 3, 2]
    if constexpr (team >= 4) x = step(x, dpp<0x4e>(mla::bit_cast<int>(x)), combine);    // quad_perm [2, 3, 0, 1]
    if constexpr (team >= 8) x = step(x, dpp<0x141>(mla::bit_cast<int>(x)), combine);   // row_half_mirror
    if constexpr (team >= 16) x = step(x, dpp<0x140>(mla::bit_cast<int>(x)), combine);  // row_mirror
    if constexpr (team >= 32) x = step(x, from_lane(mla::bit_cast<int>(x), lane ^ 16), combine);
    if constexpr (team >= 64) x = step(x, from_lane(mla::bit_cast<int>(x), lane ^ 32), combine);
    return x;
  }
};

}  // namespace cdna
