// A unit of 16 values in fp32 as what a cache stores, by the lane that holds it; all lanes of a warp take part.
#pragma once

#include "common/encode.hpp"
#include "sm_90/append_kv/record_codes.hpp"
#include "sm_90/convert_kv/elements.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm_90 {

using Part = Vec<uint32_t, 4>;

// Where a unit goes. `row` is its first byte.
struct Target {
  uint8_t* row;
  uint8_t* scales;  // of the token
  int unit;         // of the row
  bool latent;      // a unit of the latent field
  bool writes;      // this lane has a unit
  bool paired;      // its neighbour has the unit beside it
};

// Stores a unit of several times 16 bytes.
template <int count>
MLA_DEVICE void store_parts(const Target& to, const uint32_t (&words)[count]) {
  if (!to.writes) return;
#pragma unroll
  for (int i = 0; i < count; i += 4)
    reinterpret_cast<Part*>(to.row)[i / 4] = Part{words[i], words[i + 1], words[i + 2], words[i + 3]};
}

// The same after neighbouring lanes have exchanged 16 bytes in 32, so that each instruction writes whole sectors.
template <int count>
MLA_DEVICE void store_paired(const Target& to, uint32_t (&words)[count]) {
  if (!to.paired) return store_parts(to, words);
  const bool odd = to.unit % 2 != 0;
#pragma unroll
  for (int i = 0; i < count; i += 8)
#pragma unroll
    for (int k = i; k < i + 4; ++k) {
      const uint32_t got = __shfl_xor_sync(~0u, odd ? words[k] : words[k + 4], 1);
      words[k] = odd ? got : words[k];
      words[k + 4] = odd ? words[k + 4] : got;
    }
  if (!to.writes) return;
  // Of the first unit's parts and of the second's, an odd lane has those behind an even lane's.
  auto* row = reinterpret_cast<Part*>(to.row) - (odd ? count / 4 - 1 : 0);
#pragma unroll
  for (int i = 0; i < count; i += 8) {
    row[i / 4] = Part{words[i], words[i + 1], words[i + 2], words[i + 3]};
    row[i / 4 + count / 4] = Part{words[i + 4], words[i + 5], words[i + 6], words[i + 7]};
  }
}

// Two values to a word.
template <class T>
MLA_DEVICE void pack_unit(Unit& unit, uint32_t (&words)[8]) {
  unit.multiply();
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = pack_pair<T>(unit.values[2 * i], unit.values[2 * i + 1]);
}

// The scale of the units that share one, by the rule of `place`; NaN where a value is NaN or infinite.
MLA_DEVICE float common_scale(const KvPlace& place, const Unit& unit) {
  float most = fabsf(unit.largest * unit.factor);
  for (int apart = 1; apart < 1 << place.scale_shift; apart *= 2)
    most = largest_magnitude(most, __shfl_xor_sync(~0u, most, apart));
  return scale_of_tile(place, place.reciprocal, most);
}

// The value to odd to bf16: between two of these it becomes the one whose last bit is set (append_kv/record_row.hpp).
MLA_DEVICE float rounded_to_odd(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  return bit_cast<float>((bits | ((bits & 0xffff) + 0xffff)) & 0xffff0000);
}

// Codes of OCP whose values were doubled as FNUZ's of up to 224: they are alike but for -0, which is 0.
MLA_DEVICE void to_fnuz(uint32_t (&codes)[4], bool nan) {
#pragma unroll
  for (uint32_t& four : codes) {
    const uint32_t sizes = four & 0x7f7f7f7f;
    four = nan ? 0x80808080 : four & ((sizes + 0x7f7f7f7f) | 0x7f7f7f7f);
  }
}

// Values divided by a scale as e4m3 of either flavour. Scales of FNUZ's records are powers of two, of which the product
// with a factor is as exact as the quotient of a value.
template <bool fnuz>
MLA_DEVICE void encode_scaled(const KvPlace& place, float scale, Unit& unit, uint32_t (&codes)[4]) {
  if (fnuz || place.power_of_two != 0) {
    v41 format(fnuz ? scale * 0.5f : scale);
    format.inverse *= unit.factor;
    format.encode([&](int i) { return unit.values[i]; }, codes);
    if constexpr (fnuz) to_fnuz(codes, scale != scale);
  } else {
    unit.multiply();
    v32nope(scale).encode([&](int i) { return unit.values[i]; }, codes);
  }
}

// The same by one descale, which may be any number.
template <bool fnuz>
MLA_DEVICE void encode_descaled(const float* descale, Unit& unit, uint32_t (&codes)[4]) {
  unit.multiply();
  if (descale != nullptr) {
#pragma unroll
    for (float& value : unit.values) value /= *descale;
  }
  if constexpr (fnuz) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t code = mla::encode_e4m3<true>(bit_cast<uint32_t>(unit.values[i]));
      codes[i / 4] = i % 4 == 0 ? code : codes[i / 4] | code << i % 4 * 8;
    }
  } else {
    encode_e4m3([&](int i) { return unit.values[i]; }, codes, [](float quotient) { return quotient; });
  }
}

MLA_DEVICE void store_scale(const KvPlace& place, const Target& to, float scale) {
  const int number = to.unit >> place.scale_shift;
  if (to.unit != number << place.scale_shift) return;
  if (place.scale_bytes == 4) reinterpret_cast<float*>(to.scales)[number] = scale;
  else to.scales[number] = static_cast<uint8_t>(bit_cast<uint32_t>(scale) >> 23);
}

// Values of a rope field, which is bf16, or of a latent field as codes of e4m3, with the token's scales and padding.
template <bool fnuz>
MLA_DEVICE void store_e4m3(const mla::ConvertKvParams& p, const Target& to, Unit& unit) {
  const KvPlace& place = p.place[1];
  uint32_t codes[4];
  if (place.scale_bytes == 0) {
    encode_descaled<fnuz>(p.destination_descale, unit, codes);
  } else {
    const float scale = common_scale(place, unit);
    if (!to.latent) {
      uint32_t words[8];
      pack_unit<bf16>(unit, words);
      if (to.writes && place.pad != 0 && to.unit == place.latent_units) to.scales[to.unit >> place.scale_shift] = 0;
      return store_parts(to, words);
    }
    encode_scaled<fnuz>(place, scale, unit, codes);
    if (to.writes) store_scale(place, to, scale);
  }
  store_parts(to, codes);
}

// Stores a unit as the element that the tag names.
MLA_DEVICE void store_unit(stored::fp32, const mla::ConvertKvParams&, const Target& to, Unit& unit) {
  uint32_t words[16];
  unit.multiply();
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = bit_cast<uint32_t>(unit.values[i]);
  store_paired(to, words);
}
MLA_DEVICE void store_unit(stored::bf16, const mla::ConvertKvParams&, const Target& to, Unit& unit) {
  uint32_t words[8];
  pack_unit<bf16>(unit, words);
  store_paired(to, words);
}
MLA_DEVICE void store_unit(stored::fp16, const mla::ConvertKvParams&, const Target& to, Unit& unit) {
  uint32_t words[8];
  pack_unit<fp16>(unit, words);
  store_paired(to, words);
}
MLA_DEVICE void store_unit(stored::e4m3, const mla::ConvertKvParams& p, const Target& to, Unit& unit) {
  store_e4m3<false>(p, to, unit);
}
MLA_DEVICE void store_unit(stored::e4m3fnuz, const mla::ConvertKvParams& p, const Target& to, Unit& unit) {
  store_e4m3<true>(p, to, unit);
}
MLA_DEVICE void store_unit(stored::e2m1, const mla::ConvertKvParams& p, const Target& to, Unit& unit) {
  const v41_fp4 format(common_scale(p.place[1], unit));
  if (p.few_bits == 0) {
    unit.multiply();
    unit.factor = 1.0f;
#pragma unroll
    for (float& value : unit.values) value = rounded_to_odd(value);
  }
  uint32_t codes[2];
  format.encode([&](int i) { return unit.values[i]; }, unit.factor, codes);
  if (!to.writes) return;
  *reinterpret_cast<Vec<uint32_t, 2>*>(to.row) = Vec<uint32_t, 2>{codes[0], codes[1]};
  format.store_scale(to.scales, to.unit);
}

}  // namespace mla::sm_90
