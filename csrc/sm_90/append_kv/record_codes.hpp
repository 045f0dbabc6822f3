// Sixteen values of a lane as the codes and the scale of a record: e4m3 by powers of two or by fp32 scales, and e2m1.
// `value(i)` is the i-th of them.
#pragma once

#include "sm_90/ptx/convert.hpp"
#include "sm_90/ptx/math.hpp"
#include "sm_90/ptx/quantise.hpp"

namespace mla::sm_90 {

// The scale of a tile by its largest magnitude, as mla::tile_scale has it: NaN if that is NaN or infinity. The ratio is
// the rounded quotient, by two fused steps from the rounded reciprocal of the rule's divisor; a division takes ten
// instructions more. As integers, positive numbers are in order.
template <class Rule>
MLA_DEVICE float scale_of_tile(const Rule& rule, float reciprocal, float largest) {
  const float near = largest * reciprocal;
  const int ratio = bit_cast<int>(__fmaf_rn(__fmaf_rn(-near, rule.divisor, largest), reciprocal, near));
  int bits = max(ratio, bit_cast<int>(rule.smallest));
  if (rule.power_of_two != 0) bits = (bits + 0x7fffff) & 0x7f800000;  // the next power of two unless it is one
  return bit_cast<float>(bit_cast<int>(largest) < 0x7f800000 ? bits : 0x7fc00000);
}

// Values as e4m3, each divided by its scale by `quotient`.
template <class Values, class Quotient>
MLA_DEVICE void encode_e4m3(const Values& value, uint32_t (&codes)[4], Quotient quotient) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    codes[i] = e4m3_of(quotient(value(4 * i)), quotient(value(4 * i + 1)), quotient(value(4 * i + 2)),
                       quotient(value(4 * i + 3)));
}

// 512 e4m3 values, and for each TILE of them a scale that is a power of two, as E8M0.
struct v41 {
  static constexpr int TILE = 32;
  static constexpr bool ROTATES = true;
  static constexpr int CODE_WORDS = 4;

  float inverse;
  uint32_t stored;

  MLA_DEVICE v41(float scale)
      : inverse(scale == scale ? bit_cast<float>(0x7f000000 - bit_cast<uint32_t>(scale)) : scale),
        stored(bit_cast<uint32_t>(scale) >> 23 & 0xff) {}
  // A product by the inverse of a power of two is the quotient.
  template <class Values>
  MLA_DEVICE void encode(const Values& value, uint32_t (&codes)[4]) const {
    encode_e4m3(value, codes, [&](float x) { return x * inverse; });
  }
  MLA_DEVICE void store_scale(uint8_t* scales, int number) const { scales[number] = static_cast<uint8_t>(stored); }
};

// 512 e2m1 values, the first of two in the low half of their byte, and for each TILE of them an e4m3 scale.
struct v41_fp4 {
  static constexpr int TILE = 16;
  static constexpr bool ROTATES = true;
  static constexpr int CODE_WORDS = 2;

  float inverse;
  uint32_t stored;

  MLA_DEVICE v41_fp4(float scale) : stored(e4m3_of(scale, 0.0f, 0.0f, 0.0f) & 0xff) {
    uint32_t value, rest;
    e4m3_to_fp16(stored, value, rest);
    inverse = reciprocal_of_normal(fp16_value(static_cast<uint16_t>(value)));
  }
  // Divided by 2^14, e2m1's values lie where fp16 has its denormal and its smallest normal numbers: the three bits of a
  // code are the lowest of fp16's exponent and the first of its fraction, and half of a code's step rounds. A quotient
  // that is no bound is 2^-8 of itself from one, farther than the errors of `inverse` and of fp16; one that is a bound
  // is fp16's, which takes back the error. A NaN's tile has codes of 0.
  template <class Values>
  MLA_DEVICE void encode(const Values& value, uint32_t (&codes)[2]) const {
    encode(value, 1.0f, codes);
  }
  // The same of values that are multiplied by a power of two first.
  template <class Values>
  MLA_DEVICE void encode(const Values& value, float factor, uint32_t (&codes)[2]) const {
    const float whole = factor * inverse * 0x1p-14f;
    const uint32_t some = inverse == inverse ? ~0u : 0u;
    // A quotient is 6.4 at most where its scale is rounded to four bits and no largest one: codes 8 to 0x7d.
    if (stored - 8 > 0x7d - 8)
      encode_words([&](int i) { return fminf(fmaxf(value(i) * whole, -LARGEST), LARGEST); }, some, codes);
    else
      encode_words([&](int i) { return value(i) * whole; }, some, codes);
  }
  MLA_DEVICE void store_scale(uint8_t* scales, int number) const { scales[number] = static_cast<uint8_t>(stored); }

 private:
  static constexpr float LARGEST = 6 * 0x1p-14f;

  // Of a word's eight values the bytes of `even` and `odd` have every second: the sign, then what three bits follow.
  template <class Quotients>
  MLA_DEVICE static void encode_words(const Quotients& quotient, uint32_t some, uint32_t (&codes)[2]) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = rounded(pack_pair<fp16>(quotient(word * 8 + i), quotient(word * 8 + i + 4)));
      const uint32_t even = __byte_perm(pairs[0], pairs[2], 0x7351), odd = __byte_perm(pairs[1], pairs[3], 0x7351);
      const uint32_t low = (even >> 1 & 0x07070707) | (even >> 4 & 0x08080808);
      codes[word] = (low | (odd << 3 & 0x70707070) | (odd & 0x80808080)) & some;
    }
  }
  MLA_DEVICE static uint32_t rounded(uint32_t pair) { return pair + 0x00ff00ff + (pair >> 9 & 0x00010001); }
};

// 512 e4m3 values, and for each TILE of them an fp32 scale.
struct v32nope {
  static constexpr int TILE = 128;
  static constexpr bool ROTATES = false;
  static constexpr int CODE_WORDS = 4;

  float scale;
  float inverse;

  MLA_DEVICE v32nope(float scale_) : scale(scale_), inverse(1.0f / scale_) {}
  template <class Values>
  MLA_DEVICE void encode(const Values& value, uint32_t (&codes)[4]) const {
    if (scale > 0x1p-60f && scale < 0x1p60f)
      encode_e4m3(value, codes, [&](float x) { return quotient(x); });
    else  // NaN too
      encode_e4m3(value, codes, [&](float x) { return x / scale; });
  }
  MLA_DEVICE void store_scale(uint8_t* scales, int number) const { reinterpret_cast<float*>(scales)[number] = scale; }

 private:
  // The rounded quotient by Markstein's theorem, from a rounded reciprocal and two fused steps: a division takes about
  // eight instructions more. Scales far from fp32's ends leave every remainder exact that decides a code. The remainder
  // of -0 is +0, so the sign is the value's.
  MLA_DEVICE float quotient(float value) const {
    const float near = value * inverse;
    return copysignf(__fmaf_rn(__fmaf_rn(-near, scale, value), inverse, near), value);
  }
};

}  // namespace mla::sm_90
