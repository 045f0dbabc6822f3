// The rotary embedding of keys that are cached un-rotated: value i of the rope part turns with value i + 32 by the
// angle of the key's position. rope_cos_sin holds 32 cosines, then 32 sines, per position.
#pragma once

#include "cdna/common/types.hpp"
#include "common/kv_format.hpp"
#include "common/problem.hpp"

namespace cdna {

constexpr int TURN_FLOATS = mla::ROPE;  // per position
constexpr int SINES = mla::ROPE / 2;    // first of them

template <class Element>
struct Halves;

template <>
struct Halves<mla::bf16> {
  MLA_DEVICE static float low(uint32_t word) { return mla::bit_cast<float>(word << 16); }
  MLA_DEVICE static float high(uint32_t word) { return mla::bit_cast<float>(word & 0xffff0000u); }
};

// A turned pair of words: rounded to Element, and what the rounding left, in Element as well. The scores add both
// products: rounding the turned key alone would shift a score by up to 2^-9 of its rope part, which lse would show.
// A NaN is at least in the second: pack may lose it (cdna/common/convert.hpp), pack_rest does not.
struct TurnedWords {
  uint32_t first, second;
  uint32_t first_rest, second_rest;
};

// Turns two neighbouring values of the first half of the rope part with their partners of the second.
template <class Policy, class Element>
MLA_DEVICE TurnedWords turn_words(uint32_t first, uint32_t second, float cos0, float cos1, float sin0, float sin1) {
  const float a0 = Halves<Element>::low(first), a1 = Halves<Element>::high(first);
  const float b0 = Halves<Element>::low(second), b1 = Halves<Element>::high(second);
  const float x0 = a0 * cos0 - b0 * sin0, x1 = a1 * cos1 - b1 * sin1;
  const float y0 = b0 * cos0 + a0 * sin0, y1 = b1 * cos1 + a1 * sin1;
  TurnedWords turned;
  turned.first = Policy::template pack<Element>(x0, x1);
  turned.second = Policy::template pack<Element>(y0, y1);
  turned.first_rest = Policy::template pack_rest<Element>(x0 - Halves<Element>::low(turned.first),
                                                          x1 - Halves<Element>::high(turned.first));
  turned.second_rest = Policy::template pack_rest<Element>(y0 - Halves<Element>::low(turned.second),
                                                           y1 - Halves<Element>::high(turned.second));
  return turned;
}

// Cosines and sines for the eight values per lane of a 16-byte chunk.
struct ChunkTurns {
  f32x4 cos[2], sin[2];

  // `from`: the position's row of rope_cos_sin, at the lane's first value.
  MLA_DEVICE static ChunkTurns load(const float* from) {
    const f32x4* cos = reinterpret_cast<const f32x4*>(from);
    const f32x4* sin = reinterpret_cast<const f32x4*>(from + SINES);
    return ChunkTurns{{cos[0], cos[1]}, {sin[0], sin[1]}};
  }

  // The two chunks of the rope part, in place; what rounding left goes to `rest`.
  template <class Policy, class Element>
  MLA_DEVICE void turn(u32x4& first, u32x4& second, u32x4 (&rest)[2]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int v = w / 2, e = w % 2 * 2;
      const TurnedWords turned =
          turn_words<Policy, Element>(first[w], second[w], cos[v][e], cos[v][e + 1], sin[v][e], sin[v][e + 1]);
      first[w] = turned.first;
      second[w] = turned.second;
      rest[0][w] = turned.first_rest;
      rest[1][w] = turned.second_rest;
    }
  }
};

}  // namespace cdna
