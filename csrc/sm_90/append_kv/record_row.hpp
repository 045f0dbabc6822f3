// A bf16 row of 512 values that append_kv scales and quantises as a whole, its rope part too: the records of V4.1, and
// V3.2's without a rope part.
//
// A rotated pair is rounded to odd to bf16, in the place that it came from, and quantised from there: the bounds between
// two codes or two scales of V4.1 have at most seven significant bits, and an eighth that is odd never makes a value one
// of them. So the codes are those of the unrounded value.
#pragma once

#include "sm_90/append_kv/row.hpp"
#include "sm_90/ptx/quantise.hpp"

namespace mla::sm_90 {

// Sixteen values of a lane as they come: two bf16 in a word.
using SixteenValues = uint32_t[8];

// A lane's values as e4m3, each divided by its scale by `quotient`.
template <class Quotient>
MLA_DEVICE void encode_e4m3(const SixteenValues& values, uint32_t (&codes)[4], Quotient quotient) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    codes[i] = e4m3_of(quotient(bf16_low(values[2 * i])), quotient(bf16_high(values[2 * i])),
                       quotient(bf16_low(values[2 * i + 1])), quotient(bf16_high(values[2 * i + 1])));
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
  MLA_DEVICE void encode(const SixteenValues& values, uint32_t (&codes)[4]) const {
    encode_e4m3(values, codes, [&](float value) { return value * inverse; });
  }
  MLA_DEVICE void store_scale(uint8_t* scales, int number) const { scales[number] = static_cast<uint8_t>(stored); }
};

// 512 e2m1 values, the first of two in the low half of their byte, and for each TILE of them an e4m3 scale.
struct v41_fp4 {
  static constexpr int TILE = 16;
  static constexpr bool ROTATES = true;
  static constexpr int CODE_WORDS = 2;

  float inverse;  // divided by 2^14: see encode
  uint32_t stored;

  MLA_DEVICE v41_fp4(float scale) : stored(e4m3_of(scale, 0.0f, 0.0f, 0.0f) & 0xff) {
    uint32_t value, rest;
    e4m3_to_fp16(stored, value, rest);
    inverse = reciprocal_approx(fp16_value(static_cast<uint16_t>(value))) * 0x1p-14f;
  }
  // Divided by 2^14, e2m1's values lie where fp16 has its denormal and its smallest normal numbers: the three bits of a
  // code are the lowest of fp16's exponent and the first of its fraction, and half of a code's step rounds. A quotient
  // that is no bound is 2^-8 of itself from one, farther than the errors of `inverse` and of fp16; one that is a bound
  // is fp16's, which takes back the error. A NaN's tile has codes of 0.
  MLA_DEVICE void encode(const SixteenValues& values, uint32_t (&codes)[2]) const {
    const uint32_t some = inverse == inverse ? ~0u : 0u;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t bytes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = values[word * 4 + i];
        const uint32_t quotients = pack_pair<fp16>(bf16_low(pair) * inverse, bf16_high(pair) * inverse);
        const uint32_t size = min_u16x2(quotients & 0x7fff7fff, LARGEST);
        const uint32_t rounded = size + 0x00ff00ff + (size >> 9 & 0x00010001);
        const uint32_t halves = (rounded >> 9 & 0x00070007) | (quotients >> 12 & 0x00080008);
        bytes[i] = halves | halves >> 12;
      }
      const uint32_t low = __byte_perm(bytes[0], bytes[1], 0x0040), high = __byte_perm(bytes[2], bytes[3], 0x0040);
      codes[word] = __byte_perm(low, high, 0x5410) & some;
    }
  }
  MLA_DEVICE void store_scale(uint8_t* scales, int number) const { scales[number] = static_cast<uint8_t>(stored); }

 private:
  static constexpr uint32_t LARGEST = 0x0e000e00;  // 6 / 2^14, twice
};

// 512 e4m3 values, and for each TILE of them an fp32 scale.
struct v32nope {
  static constexpr int TILE = 128;
  static constexpr bool ROTATES = false;
  static constexpr int CODE_WORDS = 4;

  float scale;
  float inverse;

  MLA_DEVICE v32nope(float scale_) : scale(scale_), inverse(1.0f / scale_) {}
  MLA_DEVICE void encode(const SixteenValues& values, uint32_t (&codes)[4]) const {
    if (scale > 0x1p-60f && scale < 0x1p60f)
      encode_e4m3(values, codes, [&](float value) { return quotient(value); });
    else  // NaN too
      encode_e4m3(values, codes, [&](float value) { return value / scale; });
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

// The row as its warp holds it: each lane 16 neighbouring values. In shared memory the rope part follows the latents,
// wherever they end. `bytes_of_angle` is the size of a cosine, 0 without rotation.
template <class Format, int bytes_of_angle>
struct RecordRow {
  using Params = mla::AppendKvParams;
  static constexpr int angle_bytes = bytes_of_angle;
  static constexpr bool rotated = angle_bytes != 0;
  static_assert(Format::ROTATES || !rotated, "append_kv: rounding to odd is for scales of few bits");
  static constexpr uint32_t angle_at = 1024;
  MLA_DEVICE static uint32_t rope_at(const Params& p) { return p.latent * 2; }

  SixteenValues values;

  MLA_DEVICE void read(const Params& p, uint32_t at, int lane) {
    if constexpr (rotated) {
      rotate(p, at, lane);
      __syncwarp();
    }
    ld_shared_v4(at + lane * 32, values[0], values[1], values[2], values[3]);
    ld_shared_v4(at + lane * 32 + 16, values[4], values[5], values[6], values[7]);
  }

  // Where a token's row goes, which two fields follow from.
  MLA_DEVICE static int64_t offset(const Params&, int slot) { return slot; }

  MLA_DEVICE void store(const Params& p, int64_t slot, int lane) const {
    const Format format(mla::tile_scale<Wave>(p, bit_cast<int>(largest_of_tile())));
    uint32_t codes[Format::CODE_WORDS];
    format.encode(values, codes);
    const mla::Record record = mla::AppendKv<Wave, 1>::record_of(p, static_cast<int>(slot));
    using Codes = mla::Vec<uint32_t, Format::CODE_WORDS>;
    auto* row = reinterpret_cast<Codes*>(record.field(p.latent_per_block, p.latent_stride, p.latent_offset));
    Codes words;
    for (int i = 0; i < Format::CODE_WORDS; ++i) words[i] = codes[i];
    row[lane] = words;
    if (lane % LANES == 0)
      format.store_scale(record.field(p.scale_per_block, p.scale_stride, p.scale_offset), lane / LANES);
  }

 private:
  static constexpr int LANES = Format::TILE / 16;  // that share a scale

  // Rotates a pair a lane in shared memory.
  MLA_DEVICE static void rotate(const Params& p, uint32_t at, int lane) {
    if (2 * lane >= p.rope) return;
    const RopePair pair(p, lane);
    const uint32_t low = at + rope_at(p) + pair.first, high = low + pair.apart;
    const uint32_t cos_at = at + angle_at + lane * angle_bytes, sin_at = cos_at + p.rope / 2 * angle_bytes;
    float a = bit_cast<float>(ld_shared_u16(low) << 16), b = bit_cast<float>(ld_shared_u16(high) << 16);
    mla::rotate<Wave>(a, b, angle(p, cos_at), angle(p, sin_at));
    st_shared_u16(low, rounded_to_odd(a));
    st_shared_u16(high, rounded_to_odd(b));
  }
  MLA_DEVICE static float angle(const Params& p, uint32_t at) {
    if constexpr (angle_bytes == 4) return ld_shared<float>(at);
    return mla::value_of<Wave>(ld_shared_u16(at), p.angle_type);
  }
  // The bf16 before or behind a value that is none: of the two the odd one.
  MLA_DEVICE static uint32_t rounded_to_odd(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    return bits >> 16 | ((bits & 0xffff) != 0 ? 1 : 0);
  }

  // NaN where there is one among the values.
  MLA_DEVICE float largest_of_tile() const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = largest_magnitude(largest_magnitude(most, bf16_low(values[i])), bf16_high(values[i]));
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) most = largest_magnitude(most, __shfl_xor_sync(~0u, most, apart));
    return most;
  }
};

}  // namespace mla::sm_90
