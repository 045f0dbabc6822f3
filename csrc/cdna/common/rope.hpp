// The rotary embedding of keys that are cached un-rotated: value i of the rope part is rotated with value i + 32 by the
// angle of the key's position. rope_cos_sin holds 32 cosines, then 32 sines, per position.
#pragma once

#include "cdna/common/types.hpp"
#include "cdna/common/wave.hpp"
#include "common/encode.hpp"
#include "common/kv_format.hpp"
#include "common/problem.hpp"

namespace cdna {

constexpr int COS_SIN_FLOATS = mla::ROPE;  // per position
constexpr int FIRST_SINE = mla::ROPE / 2;

template <class Element>
struct PackedPair;

template <>
struct PackedPair<mla::bf16> {
  MLA_DEVICE static float low(uint32_t word) { return mla::bit_cast<float>(word << 16); }
  MLA_DEVICE static float high(uint32_t word) { return mla::bit_cast<float>(word & 0xffff0000u); }
};

// A rotated pair of words.
struct RotatedWords {
  uint32_t first, second;
};

// Rotates two neighbouring values of the first half of the rope part with their partners of the second, and rounds them
// to Element: the result is that of a cache of rotated keys.
template <class Policy, class Element>
MLA_DEVICE RotatedWords rotate_words(uint32_t first, uint32_t second, float cos0, float cos1, float sin0, float sin1) {
  float a0 = PackedPair<Element>::low(first), a1 = PackedPair<Element>::high(first);
  float b0 = PackedPair<Element>::low(second), b1 = PackedPair<Element>::high(second);
  mla::rotate<Wave<false>>(a0, b0, Policy::factor(cos0), Policy::factor(sin0));
  mla::rotate<Wave<false>>(a1, b1, Policy::factor(cos1), Policy::factor(sin1));
  return {Policy::template pack<Element>(a0, a1), Policy::template pack<Element>(b0, b1)};
}

// Cosines and sines for the eight values per lane of a 16-byte chunk.
struct ChunkRope {
  f32x4 cos[2], sin[2];

  // `from` is the position's row of rope_cos_sin, at the lane's first value.
  MLA_DEVICE static ChunkRope load(const float* from) {
    const f32x4* cos = reinterpret_cast<const f32x4*>(from);
    const f32x4* sin = reinterpret_cast<const f32x4*>(from + FIRST_SINE);
    return ChunkRope{{cos[0], cos[1]}, {sin[0], sin[1]}};
  }

  // Rotates the two chunks of the rope part in place.
  template <class Policy, class Element>
  MLA_DEVICE void rotate(u32x4& first, u32x4& second) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int v = w / 2, e = w % 2 * 2;
      const RotatedWords rotated =
          rotate_words<Policy, Element>(first[w], second[w], cos[v][e], cos[v][e + 1], sin[v][e], sin[v][e + 1]);
      first[w] = rotated.first;
      second[w] = rotated.second;
    }
  }
};

}  // namespace cdna
