// Sixteen neighbouring values of a row, a unit, as a cache stores them: loaded as words, and decoded to fp32 by one lane.
#pragma once

#include "common/params/convert_kv.hpp"
#include "sm_90/ptx/quantise.hpp"
#include "sm_90/sparse_decode/convert_fp4.hpp"

namespace mla::sm_90 {

// Each value times `factor`, rounded once; and the largest magnitude of `values`, NaN where there is one.
struct Unit {
  float values[16];
  float factor;
  float largest;

  MLA_DEVICE void multiply() {
#pragma unroll
    for (float& value : values) value *= factor;
  }
};

// Eight pairs of 16-bit values.
template <class T>
MLA_DEVICE void decode_pairs(const uint32_t* pairs, Unit& unit) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float both[2];
    unpack_pair<T>(pairs[i], both);
    unit.values[2 * i] = both[0];
    unit.values[2 * i + 1] = both[1];
    // Magnitudes of bf16 as integers are in order and NaN's are the largest; fp16 has an instruction for both.
    most = T::is_bf16 ? max_u16x2(most, pairs[i] & 0x7fff7fff) : largest_magnitudes(most, pairs[i]);
  }
  float both[2];
  unpack_pair<T>(most, both);
  unit.largest = largest_magnitude(both[0], both[1]);
}

// The scale that a lane has loaded, of a place whose scales are powers of two or fp32; else the descale.
MLA_DEVICE float scale_of(const KvPlace& place, uint32_t stored, const float* descale) {
  if (place.scale_bytes == 0) return descale != nullptr ? *descale : 1.0f;
  if (place.scale_bytes == 4) return bit_cast<float>(stored);
  const uint32_t bits = stored == 0 ? 0x00400000u : stored == 255 ? 0x7fc00000u : stored << 23;  // 2^(stored - 127)
  return bit_cast<float>(bits);
}

// What an instance reads and writes, as SOURCE and DESTINATION name it. WORDS hold a unit's values. MIXED: a row may end in a rope
// field of bf16. SCALED: a scale or a descale multiplies the values.
namespace stored {

struct bf16 {
  static constexpr int WORDS = 8;
  static constexpr bool MIXED = false, SCALED = false;
  MLA_DEVICE static void decode(const uint32_t* words, Unit& unit) { decode_pairs<sm_90::bf16>(words, unit); }
};

struct fp16 {
  static constexpr int WORDS = 8;
  static constexpr bool MIXED = false, SCALED = false;
  MLA_DEVICE static void decode(const uint32_t* words, Unit& unit) { decode_pairs<sm_90::fp16>(words, unit); }
};

struct fp32 {
  static constexpr int WORDS = 16;
  static constexpr bool MIXED = false, SCALED = false;
  MLA_DEVICE static void decode(const uint32_t* words, Unit& unit) {
    unit.largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      unit.values[i] = bit_cast<float>(words[i]);
      unit.largest = largest_magnitude(unit.largest, unit.values[i]);
    }
  }
};

// What e4m3 of either flavour has.
struct OneByte {
  static constexpr int WORDS = 4;
  static constexpr bool MIXED = true, SCALED = true;
  MLA_DEVICE static float scale(const KvPlace& place, uint32_t stored, const float* descale) {
    return scale_of(place, stored, descale);
  }
};

struct e4m3 : OneByte {
  MLA_DEVICE static void decode(const uint32_t* words, Unit& unit) {
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) e4m3_to_fp16(words[i], pairs[2 * i], pairs[2 * i + 1]);
    decode_pairs<sm_90::fp16>(pairs, unit);
  }
};

// FNUZ. A code's fields at fp16's places are the value but for 2^7; the code of -0 is NaN, which a unit rarely has.
struct e4m3fnuz : OneByte {
  MLA_DEVICE static void decode(const uint32_t* words, Unit& unit) {
    uint32_t pairs[8], nans = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t others = words[i] ^ 0x80808080u;
      nans |= (others - 0x01010101u) & ~others & 0x80808080u;  // not 0 if a byte of others is
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t upper = __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424);
      pairs[i] = (upper & 0x80008000) | (upper >> 1 & 0x3f803f80);
      scale_fp16x2(pairs[i], TWO_TO_7);
    }
    if (nans != 0) {
#pragma unroll
      for (uint32_t& pair : pairs) {
        if ((pair & 0xffff) == 0x8000) pair ^= 0x8000 ^ NAN_BITS;
        if (pair >> 16 == 0x8000) pair ^= (0x8000 ^ NAN_BITS) << 16;
      }
    }
    decode_pairs<sm_90::fp16>(pairs, unit);
  }

 private:
  static constexpr uint32_t TWO_TO_7 = 0x58005800;  // twice
  static constexpr uint32_t NAN_BITS = 0x7fff;
};

// With an e4m3 scale. Its values times the scale are bf16.
struct e2m1 {
  static constexpr int WORDS = 2;
  static constexpr bool MIXED = false, SCALED = true;
  MLA_DEVICE static void decode(const uint32_t* words, Unit& unit) {
    uint32_t pairs[8];
    e2m1_to_bf16(words[0], reinterpret_cast<uint32_t(&)[4]>(pairs[0]));
    e2m1_to_bf16(words[1], reinterpret_cast<uint32_t(&)[4]>(pairs[4]));
    decode_pairs<sm_90::bf16>(pairs, unit);
  }
  MLA_DEVICE static float scale(const KvPlace&, uint32_t stored, const float*) {
    uint32_t value, rest;
    e4m3_to_fp16(stored, value, rest);
    return fp16_value(static_cast<uint16_t>(value));
  }
};

}  // namespace stored
}  // namespace mla::sm_90
