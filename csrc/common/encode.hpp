// Conversions from fp32 to the encodings that a KV layout may have, and to fp32 from those that inputs may have. They
// are in integer arithmetic, so that every arch writes the same bytes: gfx942 converts to FNUZ in hardware, gfx950 and
// sm_90 to OCP, none to both. A NaN becomes the positive quiet NaN of the encoding.
#pragma once

#include "common/device.hpp"

namespace mla {

constexpr int ENCODED_BF16 = 0;
constexpr int ENCODED_FP16 = 1;
constexpr int ENCODED_FP32 = 2;
constexpr int ENCODED_E4M3FN = 3;
constexpr int ENCODED_E4M3FNUZ = 4;
constexpr int ENCODED_E8M0 = 5;
constexpr int ENCODED_E2M1 = 6;  // two to a byte, the first in its low half

MLA_DEVICE bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

MLA_DEVICE uint16_t encode_bf16(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(is_nan_bits(bits) ? 0x7fc0 : rounded);
}

// The code of a magnitude in `mantissa` bits behind an exponent biased by `bias`. Saturates to the value of `largest`.
template <int mantissa, int bias, uint32_t largest>
MLA_DEVICE uint32_t encode_size(uint32_t bits) {
  constexpr int cut = 23 - mantissa;                         // bits that are rounded away
  constexpr uint32_t normal = (128 - bias) << 23;            // the smallest normal value, 2^(1 - bias)
  constexpr uint32_t anchor = (128 - bias + cut) << 23;  // fp32 values from here on are a subnormal's step apart
  uint32_t size = bits & 0x7fffffff;
  size = size < largest ? size : largest;
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(size) + bit_cast<float>(anchor)) - anchor;
  const uint32_t large = ((size + ((1 << (cut - 1)) - 1) + (size >> cut & 1)) >> cut) - ((127 - bias) << mantissa);
  return size < normal ? small : large;
}

// The largest values are 448 with exponents biased by 7 (OCP) and 240 with 8 (FNUZ, which has no -0).
template <bool fnuz>
MLA_DEVICE uint8_t encode_e4m3(uint32_t bits) {
  const uint32_t code = fnuz ? encode_size<3, 8, 0x43700000>(bits) : encode_size<3, 7, 0x43e00000>(bits);
  const uint32_t sign = fnuz && code == 0 ? 0 : bits >> 24 & 0x80;
  return static_cast<uint8_t>(is_nan_bits(bits) ? (fnuz ? 0x80 : 0x7f) : code | sign);
}

// The fp32 bits of the value that encode_e4m3<false> has for a positive number.
MLA_DEVICE uint32_t rounded_to_e4m3(uint32_t bits) {
  constexpr uint32_t largest = 0x43e00000, normal = 0x3c800000, anchor = 0x46800000;
  const uint32_t size = bits < largest ? bits : largest;
  const uint32_t small = bit_cast<uint32_t>((bit_cast<float>(size) + bit_cast<float>(anchor)) - bit_cast<float>(anchor));
  const uint32_t large = (size + 0x7ffff + (size >> 20 & 1)) & 0xfff00000;
  return is_nan_bits(bits) ? bits : size < normal ? small : large;
}

// At most 6; there is no NaN, which becomes 0.
MLA_DEVICE uint32_t encode_e2m1(uint32_t bits) {
  const uint32_t code = encode_size<1, 1, 0x40c00000>(bits) | (bits >> 28 & 8);
  return is_nan_bits(bits) ? 0 : code;
}

// The code of the fp32 value with these bits, in the low bits of a word.
template <class Wave, int encoding>
MLA_DEVICE uint32_t encode(uint32_t bits) {
  if constexpr (encoding == ENCODED_BF16) return encode_bf16(bits);
  else if constexpr (encoding == ENCODED_FP16)
    return is_nan_bits(bits) ? 0x7e00 : Wave::pack_fp16(bit_cast<float>(bits), 0.0f) & 0xffff;
  else if constexpr (encoding == ENCODED_FP32) return bits;
  else if constexpr (encoding == ENCODED_E4M3FN) return encode_e4m3<false>(bits);
  else if constexpr (encoding == ENCODED_E4M3FNUZ) return encode_e4m3<true>(bits);
  else if constexpr (encoding == ENCODED_E2M1) return encode_e2m1(bits);
  else return bits >> 23 & 0xff;  // of a positive power of two, or of NaN
}

// Element `index` of a field that begins at `field`: the fp32 value with these bits. Not for elements of half a byte.
template <class Wave>
MLA_DEVICE void store_encoded(uint8_t* field, int index, int encoding, uint32_t bits) {
  if (encoding == ENCODED_BF16) {
    reinterpret_cast<uint16_t*>(field)[index] = static_cast<uint16_t>(encode<Wave, ENCODED_BF16>(bits));
  } else if (encoding == ENCODED_FP16) {
    reinterpret_cast<uint16_t*>(field)[index] = static_cast<uint16_t>(encode<Wave, ENCODED_FP16>(bits));
  } else if (encoding == ENCODED_FP32) {
    reinterpret_cast<uint32_t*>(field)[index] = bits;
  } else if (encoding == ENCODED_E4M3FN) {
    field[index] = encode_e4m3<false>(bits);
  } else if (encoding == ENCODED_E4M3FNUZ) {
    field[index] = encode_e4m3<true>(bits);
  } else {
    field[index] = static_cast<uint8_t>(encode<Wave, ENCODED_E8M0>(bits));
  }
}

// A pair of rope values (a, b) by an angle. Two roundings each, as the definition has them: a fused operation would
// round once.
template <class Wave>
MLA_DEVICE void rotate(float& a, float& b, float cos, float sin) {
  const float first = Wave::difference(Wave::product(a, cos), Wave::product(b, sin));
  b = Wave::difference(Wave::product(b, cos), -Wave::product(a, sin));
  a = first;
}

// An fp32 value rounded to the type of the rows, one of the first three encodings.
template <class Wave>
MLA_DEVICE float rounded_to(float value, int encoding) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (encoding == ENCODED_BF16) return bit_cast<float>(static_cast<uint32_t>(encode_bf16(bits)) << 16);
  if (encoding == ENCODED_FP16) return Wave::fp16_value(static_cast<uint16_t>(encode<Wave, ENCODED_FP16>(bits)));
  return value;
}

// A pair of a record that quantises rope values. The definition has it after the CUDA writers of vLLM and SGLang, which
// fuse, and round to the type of the rows before they choose scales (`rounded_to`).
template <class Wave>
MLA_DEVICE void rotate_fused(float& a, float& b, float cos, float sin) {
  const float first = __builtin_fmaf(a, cos, -Wave::product(b, sin));
  b = __builtin_fmaf(a, sin, Wave::product(b, cos));
  a = first;
}

// The bits of element `index` of an array in one of the first three encodings, and the fp32 value that they stand for.
// Apart, so that several loads can be under way: a conversion right behind each would wait for it.
MLA_DEVICE uint32_t load_bits(const void* array, int encoding, int64_t index) {
  if (encoding == ENCODED_FP32) return static_cast<const uint32_t*>(array)[index];
  return static_cast<const uint16_t*>(array)[index];
}
template <class Wave>
MLA_DEVICE float value_of(uint32_t bits, int encoding) {
  if (encoding == ENCODED_FP32) return bit_cast<float>(bits);
  return encoding == ENCODED_BF16 ? bit_cast<float>(bits << 16) : Wave::fp16_value(static_cast<uint16_t>(bits));
}

}  // namespace mla
