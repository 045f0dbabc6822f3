// The rotary embedding of keys that are cached un-rotated: value i of the rope part is rotated with value i + 32 by the
// angle of the key's position. rope_cos_sin holds 32 cosines, then 32 sines, per position.
#pragma once

#include "cdna/common/types.hpp"
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

// A rotated pair of words, rounded to Element, and the residual of the rounding, in Element as well. QK^T adds both
// products: rounding the rotated key alone would shift a score by up to 2^-9 of its rope part, which lse would show. At
// least the residual keeps a NaN: pack may lose it (convert.hpp), pack_residual does not.
struct RotatedWords {
  uint32_t first, second;
  uint32_t first_residual, second_residual;
};

// Rotates two neighbouring values of the first half of the rope part with their partners of the second.
template <class Policy, class Element>
MLA_DEVICE RotatedWords rotate_words(uint32_t first, uint32_t second, float cos0, float cos1, float sin0, float sin1) {
  const float a0 = PackedPair<Element>::low(first), a1 = PackedPair<Element>::high(first);
  const float b0 = PackedPair<Element>::low(second), b1 = PackedPair<Element>::high(second);
  const float x0 = a0 * cos0 - b0 * sin0, x1 = a1 * cos1 - b1 * sin1;
  const float y0 = b0 * cos0 + a0 * sin0, y1 = b1 * cos1 + a1 * sin1;
  RotatedWords rotated;
  rotated.first = Policy::template pack<Element>(x0, x1);
  rotated.second = Policy::template pack<Element>(y0, y1);
  rotated.first_residual = Policy::template pack_residual<Element>(x0 - PackedPair<Element>::low(rotated.first),
                                                                   x1 - PackedPair<Element>::high(rotated.first));
  rotated.second_residual = Policy::template pack_residual<Element>(y0 - PackedPair<Element>::low(rotated.second),
                                                                    y1 - PackedPair<Element>::high(rotated.second));
  return rotated;
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

  // Rotates the two chunks of the rope part in place and returns what rounding left in `residual`.
  template <class Policy, class Element>
  MLA_DEVICE void rotate(u32x4& first, u32x4& second, u32x4 (&residual)[2]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int v = w / 2, e = w % 2 * 2;
      const RotatedWords rotated =
          rotate_words<Policy, Element>(first[w], second[w], cos[v][e], cos[v][e + 1], sin[v][e], sin[v][e + 1]);
      first[w] = rotated.first;
      second[w] = rotated.second;
      residual[0][w] = rotated.first_residual;
      residual[1][w] = rotated.second_residual;
    }
  }
};

}  // namespace cdna
