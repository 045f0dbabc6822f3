// How sparse decode turns stored fp8 values into the bf16 that is multiplied, on gfx942; see dequant_piece.
//
// The instruction that widens fp8 reads FNUZ e4m3. An OCP code is twice its FNUZ value, with two exceptions: 0x80 is -0
// and would be NaN, 0x7f and 0xff are NaN and would be 240 and -240. The first becomes 0 before it is widened. The
// second makes the scale NaN, and so all 16 values: one NaN in a key makes the key's scores NaN, and thereby all
// results.
#pragma once

#include "gfx942/policy.hpp"

namespace gfx942 {

// As Policy, with results that are roundable: their factors are reciprocals of sums and a descale.
struct SparsePolicy : Policy {
  MLA_DEVICE static float reciprocal(float x) { return factor(Policy::reciprocal(x)); }
};

// How products are rounded to bf16. Those of a power of two have no more than four significant bits.
struct Exact {
  MLA_DEVICE static uint32_t pack(float low, float high) { return cdna::truncate_to_bf16(low, high); }
};
struct ToNearestEven {
  MLA_DEVICE static uint32_t pack(float low, float high) { return cdna::pack_bf16(low, high); }
};

// FNUZ e4m3 times a scale.
template <class Rounding>
struct FnuzDequant {
  float scale;

  // 2^(byte - 127): 0 stands for the denormal 2^-127, 255 for NaN.
  MLA_DEVICE static uint32_t from_e8m0(uint32_t byte) {
    return byte << 23 | (((byte + 1) & 0xfe) == 0 ? 0x400000u : 0u);
  }
  MLA_DEVICE cdna::u32x4 prepared(cdna::u32x4 values) const { return values; }
  MLA_DEVICE uint32_t low(uint32_t four) const { return pack(widened<false>(four)); }
  MLA_DEVICE uint32_t high(uint32_t four) const { return pack(widened<true>(four)); }

 protected:
  typedef float Pair __attribute__((ext_vector_type(2)));

  template <bool upper>
  MLA_DEVICE static Pair widened(uint32_t four) {
    return __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), upper);
  }
  MLA_DEVICE uint32_t pack(Pair values) const {
    const Pair scaled = values * Pair{scale, scale};
    const float low = scaled[0], high = scaled[1];
    return Rounding::pack(low, high);
  }
};

// OCP e4m3 times a scale.
template <class Rounding>
struct OcpDequant : FnuzDequant<Rounding> {
  using Fnuz = FnuzDequant<Rounding>;
  using typename Fnuz::Pair;

  MLA_DEVICE explicit OcpDequant(float scale) : Fnuz{scale} {}

  // A NaN becomes one that stays a NaN when products are rounded.
  MLA_DEVICE static uint32_t from_fp32(uint32_t bits) {
    return mla::bit_cast<uint32_t>(cdna::roundable(mla::bit_cast<float>(bits)));
  }

  // Four codes at once: adding to the lower seven bits of each carries into the eighth, and no further.
  MLA_DEVICE cdna::u32x4 prepared(cdna::u32x4 values) {
    constexpr uint32_t low_bits = 0x7f7f7f7f, high_bits = 0x80808080;
    uint32_t any_nan = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t four = values[i], size = four & low_bits;
      any_nan |= size + 0x01010101;
      values[i] = size | (four & (size + low_bits) & high_bits);  // without the sign of zeros
    }
    const uint32_t bits = mla::bit_cast<uint32_t>(this->scale);
    this->scale = mla::bit_cast<float>(cdna::opaque((any_nan & high_bits) != 0 ? 0x7fc00000u : bits));
    return values;
  }
  MLA_DEVICE uint32_t low(uint32_t four) const { return this->pack(twice(Fnuz::template widened<false>(four))); }
  MLA_DEVICE uint32_t high(uint32_t four) const { return this->pack(twice(Fnuz::template widened<true>(four))); }

 private:
  // Values and not the scale are doubled, which 2^127 would not survive.
  MLA_DEVICE static Pair twice(Pair values) { return values + values; }
};

// e2m1 times an e4m3 scale, exactly. e2m1 becomes the FNUZ code of twice its value, because the scale, an OCP code that
// is read as FNUZ, is half of its own.
struct Fp4Dequant {
  float scale;

  // -0 becomes 0, and a NaN among the four makes all of them FNUZ's NaN.
  MLA_DEVICE static uint32_t prepared_scales(uint32_t four) {
    constexpr uint32_t low_bits = 0x7f7f7f7f, high_bits = 0x80808080;
    const uint32_t size = four & low_bits;
    const uint32_t codes = size | (four & (size + low_bits) & high_bits);
    return (size + 0x01010101 & high_bits) != 0 ? high_bits : codes;
  }
  MLA_DEVICE explicit Fp4Dequant(uint32_t code)
      : scale(__builtin_amdgcn_cvt_f32_fp8(static_cast<int>(code), 0)) {}

  // Even and odd values apart, since each has a byte in what is widened.
  MLA_DEVICE cdna::u32x4 eight(uint32_t codes) const {
    const uint32_t size = codes & 0x77777777;
    const uint32_t signs = codes & (size + 0x77777777);  // bit 3 of each four, unless the value is zero
    const uint32_t even = doubled(size) | (signs << 4 & 0x80808080), odd = doubled(size >> 4) | (signs & 0x80808080);
    const Pair even_low = times_scale<false>(even), even_high = times_scale<true>(even);
    const Pair odd_low = times_scale<false>(odd), odd_high = times_scale<true>(odd);
    return cdna::u32x4{packed(even_low[0], odd_low[0]), packed(even_low[1], odd_low[1]),
                       packed(even_high[0], odd_high[0]), packed(even_high[1], odd_high[1])};
  }

 private:
  typedef float Pair __attribute__((ext_vector_type(2)));

  // FNUZ codes of 0, 1, 2, 3, 4, 6, 8 and 12, by the low three bits of each byte.
  MLA_DEVICE static uint32_t doubled(uint32_t sizes) {
    return __builtin_amdgcn_perm(0x5c585450, 0x4c484000, sizes & 0x07070707);
  }
  template <bool upper>
  MLA_DEVICE Pair times_scale(uint32_t four) const {
    return __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), upper) * Pair{scale, scale};
  }
  MLA_DEVICE static uint32_t packed(float low, float high) { return Exact::pack(low, high); }
};

}  // namespace gfx942
