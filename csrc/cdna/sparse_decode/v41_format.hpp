// V4.1's KV formats of sparse decode, with the scales of a page behind all of its tokens: see kv_format.hpp.
#pragma once

#include "cdna/sparse_decode/kv_format.hpp"

namespace cdna::sparse {

// 528 bytes: 512 fp8 values, and behind all tokens of a page 16 bytes each with E8M0 scales of 32 values.
template <class Convert>
struct V41Format {
  static constexpr int qk_dim = 512;
  static constexpr bool separate_scales = true;
  static constexpr int raw_registers = 18;
  static constexpr bool is_dequantised = true;
  static constexpr bool has_fp4 = false;
  static constexpr bool descaled = false;

  struct Raw {
    u32x4 latent[4];
    uint32_t scale[2];  // bytes 8 k + 4 * (part % 2) + 2 * half + part / 2
  };

  MLA_DEVICE static uint64_t row_at(const SelectedToken& token) {
    return token.page_at + token.in_page * static_cast<uint64_t>(512);
  }
  MLA_DEVICE static uint64_t scales_at(const SelectedToken& token) {
    return token.page_at + token.page * static_cast<uint64_t>(512) + token.in_page * static_cast<uint64_t>(16);
  }

  MLA_DEVICE static void load_half(Raw&, uint64_t, const GatherLane&) {}
  MLA_DEVICE static void load(Raw& raw, uint64_t row, uint64_t scales, const GatherLane& lane) {
    const uint64_t scale_at = scales + (lane.part % 2 * 4 + lane.half * 2 + lane.part / 2);
#pragma unroll
    for (int k = 0; k < 2; ++k) raw.scale[k] = load_global<uint8_t>(scale_at + 8 * k);
#pragma unroll
    for (int m = 0; m < 4; ++m) raw.latent[m] = load_global<u32x4>(row + lane.piece() * 16 + m * 128);
  }

  static constexpr int pieces = 4;
  MLA_DEVICE static void store(int piece, const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    if (piece == 0) store_one<0>(raw, at, map);
    if (piece == 1) store_one<1>(raw, at, map);
    if (piece == 2) store_one<2>(raw, at, map);
    if (piece == 3) store_one<3>(raw, at, map);
  }

  MLA_DEVICE static Slots converted(int piece, const Raw& raw) {
    if (piece == 0) return converted_one<0>(raw);
    if (piece == 1) return converted_one<1>(raw);
    if (piece == 2) return converted_one<2>(raw);
    return converted_one<3>(raw);
  }
  MLA_DEVICE static void write(const Slots (&converted)[pieces], uint32_t at, const GatherWriteMap& map) {
#pragma unroll
    for (int m = 0; m < pieces; ++m) converted[m].write(at + m * 2048, map);
  }

 private:
  // The scale of the lane's 16 values of piece m, which lane m % 2 or m % 2 + 2 of each four has.
  template <int m>
  MLA_DEVICE static Convert convert(const Raw& raw) {
    return Convert{mla::bit_cast<float>(from_quad<m % 2, 2>(Convert::from_e8m0(raw.scale[m / 2])))};
  }
  template <int m>
  MLA_DEVICE static Slots converted_one(const Raw& raw) {
    return Slots::dequantised(raw.latent[m], convert<m>(raw));
  }
  template <int m>
  MLA_DEVICE static void store_one(const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    dequant_piece(raw.latent[m], convert<m>(raw), at + m * 2048, map);
  }
};

// Tokens of 528 bytes and, in pools that the launch parameters name, of 288: 256 bytes of 512 e2m1 values, the first of
// two in the low half of a byte, and behind all tokens of a page 32 bytes each with e4m3 scales of 16 values.
//
// `ConvertFp4` is the arch's way from 16 e2m1 values to bf16:
//   prepared_scales  four scales as they are stored -> what the constructor takes one of, in the low byte
//   eight            eight values, times the scale
template <class ConvertFp8, class ConvertFp4>
struct V41AnyFormat {
  using Fp8 = V41Format<ConvertFp8>;
  static constexpr int qk_dim = Fp8::qk_dim;
  static constexpr bool separate_scales = true;
  static constexpr int raw_registers = Fp8::raw_registers;
  static constexpr bool is_dequantised = true;
  static constexpr bool has_fp4 = true;
  static constexpr bool descaled = false;

  // Of 288 bytes, latent[m] has eight bytes in its first half, and scale[0] has scales 8 * part + 4 * half + 0..3.
  struct Raw : Fp8::Raw {
    bool fp4;
  };

  // The address's last bit says whether the token has 288 bytes.
  MLA_DEVICE static uint64_t row_at(const SelectedToken& token) {
    return token.fp4 ? token.page_at + token.in_page * static_cast<uint64_t>(256) + 1 : Fp8::row_at(token);
  }
  MLA_DEVICE static uint64_t scales_at(const SelectedToken& token) {
    if (!token.fp4) return Fp8::scales_at(token);
    return token.page_at + token.page * static_cast<uint64_t>(256) + token.in_page * static_cast<uint64_t>(32);
  }

  MLA_DEVICE static void load_half(Raw&, uint64_t, const GatherLane&) {}
  MLA_DEVICE static void load(Raw& raw, uint64_t row, uint64_t scales, const GatherLane& lane) {
    raw.fp4 = (row & 1) != 0;
    if (raw.fp4) {
      raw.scale[0] = load_global<uint32_t>(scales + 8 * lane.part + 4 * lane.half);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const u32x2 sixteen = load_global<u32x2>(row - 1 + lane.piece() * 8 + m * 64);
        raw.latent[m].xy = sixteen;
      }
    } else {
      Fp8::load(raw, row, scales, lane);
    }
  }

  static constexpr int pieces = Fp8::pieces;
  MLA_DEVICE static void store(int piece, const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    if (raw.fp4) dequant_piece(raw.latent[piece].xy, convert(piece, raw), at + piece * 2048, map);
    else Fp8::store(piece, raw, at, map);
  }

  MLA_DEVICE static Slots converted(int piece, const Raw& raw) {
    if (raw.fp4) return Slots::dequantised(raw.latent[piece].xy, convert(piece, raw));
    return Fp8::converted(piece, raw);
  }
  MLA_DEVICE static void write(const Slots (&converted)[pieces], uint32_t at, const GatherWriteMap& map) {
    Fp8::write(converted, at, map);
  }

 private:
  // The scale of the lane's 16 values of a piece, which lane `piece` of each four has among four of them.
  MLA_DEVICE static ConvertFp4 convert(int piece, const Raw& raw) {
    const uint32_t scales = ConvertFp4::prepared_scales(raw.scale[0]);
    const uint32_t four = piece == 0   ? from_quad<0>(scales)
                          : piece == 1 ? from_quad<1>(scales)
                          : piece == 2 ? from_quad<2>(scales)
                                       : from_quad<3>(scales);
    return ConvertFp4(four >> 8 * (Lane::current().index % 4));
  }
};

}  // namespace cdna::sparse
