// The bytes of four keys that each lane of a producer warp copies, dequantises and stores.
#pragma once

#include "sm_90/decode/convert_fp8.hpp"
#include "sm_90/sparse_decode/convert_fp4.hpp"
#include "sm_90/sparse_decode/traits.hpp"

namespace mla::sm_90 {

// Copying: lanes 0..15 copy the first two keys, the others the last two, 16 bytes each at a time.
template <class Traits>
struct CopyLayout {
  uint32_t token;      // where the addresses of the tokens lie that the lane copies, of a batch's first four
  uint32_t to_scales;  // where the distances from there to the scales lie
  uint32_t copied;     // within a raw stage: the first 16 bytes that it copies

  MLA_DEVICE CopyLayout(uint32_t lane, uint32_t scratch)
      : token(scratch + Traits::SCRATCH_ROWS + lane / 16 * 16),
        to_scales(scratch + Traits::SCRATCH_SCALES + lane / 16 * 8),
        copied(lane / 16 * 1024 + lane % 16 * 16) {}

  // The distance in a stage from a key to the one `keys` further on: as many rows of 128 bytes, and as many 16-byte
  // positions of the swizzle. It is applied by xor; `keys` is a power of two below 8.
  MLA_DEVICE static constexpr uint32_t step(uint32_t keys) { return keys * (128 + 16); }
};

// Dequantising e4m3 values: two keys at a time, in lines of 64 values, which are 128 bytes of a stage. A lane has 16 values of the
// first 256 of a key, and 16 of the last. Lanes 4..7 of each 8 take the second key and another line than the others. So
// eight lanes read and write all banks: the first key's pieces are at even positions, the second's, by the swizzle, at
// odd ones.
template <class Traits>
struct GatherLayout : CopyLayout<Traits> {
  using KvFormat = typename Traits::KvFormat;
  using Base = CopyLayout<Traits>;
  using Base::copied, Base::step, Base::to_scales, Base::token;

  uint32_t stored;     // its values of the first 256
  uint32_t rope;       // eight values of its rope part; eight lanes share a key
  uint32_t scale;      // of its values
  uint32_t seventh;    // of its last values: there are seven scales of seven lines of 64
  uint32_t to;         // within a KV stage: where the first pair's values go
  uint32_t row;        // and where the bf16 values go

  // `first` is the number of the warp's first key within a stage.
  MLA_DEVICE GatherLayout(uint32_t lane, uint32_t first, uint32_t scratch) : Base(lane, scratch) {
    const uint32_t key = lane / 4 % 2;
    const uint32_t line = lane / 8 ^ key;  // and four more
    const uint32_t piece = lane % 4 * 2;
    const uint32_t keys = (first / 8 * Traits::GROUP_BYTES) ^ step(first % 8);
    stored = key * 512 + line * 64 + piece * 8;
    to = (keys ^ (key * 128 + (piece ^ key) * 16)) + line * Traits::BLOCK_BYTES;
    const uint32_t tail = Traits::TAILS + key * KvFormat::TAIL;
    if constexpr (!KvFormat::HAS_SCALES)
      scale = 0;
    else if constexpr (!KvFormat::SCALES_APART)
      scale = tail + line / 2 * 4;
    else if constexpr (KvFormat::SCALE_VALUES == 32)
      scale = tail + KvFormat::TAIL_SCALES + line * 2 + piece / 4;
    else
      scale = tail + KvFormat::TAIL_SCALES + line;
    seventh = scale + (line < 3 ? 4 : 3);
    if constexpr (!Traits::HAS_ROPE) return;
    const uint32_t rope_key = lane / 8, part = lane % 8;
    if constexpr (!KvFormat::HAS_SCALES)
      rope = Traits::TAILS + rope_key * KvFormat::TAIL + part * 8;
    else if constexpr (KvFormat::SCALES_APART)
      rope = part < 4 ? rope_key * 512 + 448 + part * 16 : Traits::TAILS + rope_key * KvFormat::TAIL + (part - 4) * 16;
    else
      rope = Traits::TAILS + rope_key * KvFormat::TAIL + 16 + part * 16;
    row = (keys ^ (rope_key * 128 + (part ^ rope_key) * 16)) + KvFormat::LATENT / 64 * Traits::BLOCK_BYTES;
  }

  // Returns whether the lane's values of the last 256 exist: there may be no eighth line.
  MLA_DEVICE bool has_last() const { return KvFormat::LATENT == 512 || seventh != scale + 3; }

  // Keeps the members in registers, so that the compiler does not compute them anew.
  MLA_DEVICE void keep() {
    if constexpr (!KvFormat::HAS_SCALES) {
      pin_registers(copied, stored, to, token);
      if constexpr (Traits::HAS_ROPE) pin_registers(rope, row);
    } else if constexpr (Traits::HAS_ROPE) {
      pin_together(copied, stored, rope, scale, to, row, token);
      if constexpr (KvFormat::SCALES_APART) pin_together(seventh, to_scales);
    } else {
      pin_registers(copied, stored, scale, to, token);
      if constexpr (KvFormat::SCALES_APART) pin_registers(to_scales);
    }
  }
};

// An E8M0 scale as bf16 in both halves of a register: 2^(exponent - 127), a denormal number where the exponent is 0; 255
// is NaN.
MLA_DEVICE uint32_t e8m0_to_bf16x2(uint32_t exponent) {
  return exponent == 255 ? 0x7fff7fffu : max(exponent * 0x00800080u, 0x00400040u);
}

// 16 values of a lane as they are stored, and their scale. Chunks 0 and 1 are of the first 256 and of the last values
// of the first two keys, 2 and 3 of the second two.
template <class Traits>
struct QuantChunk {
  using KvFormat = typename Traits::KvFormat;

  uint32_t stored[4];
  uint32_t scale;

  MLA_DEVICE void load(uint32_t number, uint32_t raw_stage, const GatherLayout<Traits>& layout) {
    ld_shared_v4(raw_stage + layout.stored + number / 2 * 1024 + number % 2 * 256, stored);
    const uint32_t pair = raw_stage + number / 2 * (2 * KvFormat::TAIL);
    if constexpr (!KvFormat::HAS_SCALES) return;
    if constexpr (!KvFormat::SCALES_APART)
      scale = ld_shared<uint32_t>(pair + layout.scale + number % 2 * 8);
    else if constexpr (KvFormat::LATENT == 512)
      scale = ld_shared_u8(pair + layout.scale + number % 2 * (256 / KvFormat::SCALE_VALUES));
    else
      scale = ld_shared_u8(pair + (number % 2 == 0 ? layout.scale : layout.seventh));
  }

  MLA_DEVICE void to_bf16(uint32_t (&values)[8]) const {
    if constexpr (!KvFormat::HAS_SCALES)
      convert_e4m3<bf16>(stored, values);
    else if constexpr (KvFormat::ARBITRARY_SCALE)
      dequant_fp32_scale(stored, bit_cast<float>(scale), values);
    else
      dequant_e8m0(values);
  }

 private:
  // bf16 holds e4m3 values exactly, so the one product of two of them is rounded as the fp32 product would be.
  MLA_DEVICE void dequant_e8m0(uint32_t (&values)[8]) const {
    convert_e4m3<bf16>(stored, values);
    const uint32_t scales = e8m0_to_bf16x2(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) scale_bf16x2(values[i], scales);
  }
};

// The values of a lane of a round of four keys, in four parts of 16 for each two keys or, of e2m1, of 16 for all four;
// each is loaded from a raw stage, and later stored dequantised to the place of the round's keys in a stage.
template <class Traits>
struct E4m3Round {
  using Layout = GatherLayout<Traits>;
  QuantChunk<Traits> chunk[4];

  MLA_DEVICE void load(int part, uint32_t raw_stage, const Layout& layout) { chunk[part].load(part, raw_stage, layout); }

  MLA_DEVICE void store(int part, uint32_t to, const Layout& layout) const {
    uint32_t values[8];
    chunk[part].to_bf16(values);
    const uint32_t position = to ^ part / 2 * Layout::step(2);
    const uint32_t offset = part % 2 * (4 * Traits::BLOCK_BYTES);
    const bool active = part % 2 == 0 || layout.has_last();
    st_shared_v4_if(active, position + offset, values[0], values[1], values[2], values[3]);
    st_shared_v4_if(active, (position ^ 16) + offset, values[4], values[5], values[6], values[7]);
  }
};

// Eight values of a key's rope part, as bf16 where they are stored.
template <class Traits>
struct RopePiece {
  static constexpr bool CONVERTED = !Traits::KvFormat::HAS_SCALES;  // they are e4m3
  uint32_t values[4];

  MLA_DEVICE void load(uint32_t from) {
    if constexpr (CONVERTED)
      ld_shared_v2(from, values[0], values[2]);
    else
      ld_shared_v4(from, values);
  }

  MLA_DEVICE void store(uint32_t to) {
    if constexpr (CONVERTED) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        e4m3_to_fp16(values[i], values[i], values[i + 1]);
        values[i] = fp16_to_bf16(values[i]);
        values[i + 1] = fp16_to_bf16(values[i + 1]);
      }
    }
    st_shared_v4(to, values[0], values[1], values[2], values[3]);
  }
};

// Dequantising e2m1 values: four keys at a time, in lines of 64 values. A lane has half a line of the first 256 values
// of a key, and of the last. So eight lanes, with four keys, read all banks, because keys lie 288 bytes apart, and write
// all banks, because the swizzle has each key's pieces at other positions.
template <class Traits>
struct Fp4Layout : CopyLayout<Traits> {
  using Base = CopyLayout<Traits>;
  using Base::copied, Base::to_scales, Base::token;
  static constexpr uint32_t KEY_BYTES = 288;

  uint32_t stored;  // its values of the first 256
  uint32_t scale;   // two of them
  uint32_t to;      // within a KV stage: where its values go

  MLA_DEVICE Fp4Layout(uint32_t lane, uint32_t first, uint32_t scratch) : Base(lane, scratch) {
    const uint32_t key = lane % 4, half = lane / 4 % 2, line = lane / 8;
    const uint32_t keys = (first / 8 * Traits::GROUP_BYTES) ^ Base::step(first % 8);
    stored = key * KEY_BYTES + line * 32 + half * 16;
    scale = key * KEY_BYTES + 256 + line * 4 + half * 2;
    to = (keys ^ (key * 128 + (half * 4 ^ key) * 16)) + line * Traits::BLOCK_BYTES;
  }
  MLA_DEVICE void keep() { pin_registers(copied, stored, scale, to, token, to_scales); }
};

template <class Traits>
struct Fp4Round {
  using Layout = Fp4Layout<Traits>;
  uint32_t stored[2][4];
  uint32_t scales[2];

  // Two parts are loaded together.
  MLA_DEVICE void load(int part, uint32_t raw_stage, const Layout& layout) {
    if (part % 2 != 0) return;
    ld_shared_v4(raw_stage + layout.stored + part / 2 * 128, stored[part / 2]);
    scales[part / 2] = ld_shared_u16(raw_stage + layout.scale + part / 2 * 16);
  }

  MLA_DEVICE void store(int part, uint32_t to, const Layout&) const {
    const uint32_t scale = e4m3_to_bf16x2(scales[part / 2] >> part % 2 * 8);
    const uint32_t at = to + part / 2 * (4 * Traits::BLOCK_BYTES);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t values[4];
      dequant_e2m1(stored[part / 2][part % 2 * 2 + i], scale, values);
      st_shared_v4(at ^ (part % 2 * 2 + i) * 16, values[0], values[1], values[2], values[3]);
    }
  }
};

}  // namespace mla::sm_90
