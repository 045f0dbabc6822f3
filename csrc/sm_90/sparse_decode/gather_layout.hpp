// The bytes of four keys that each lane of a producer warp copies, dequantises and stores.
#pragma once

#include "sm_90/decode/convert_fp8.hpp"
#include "sm_90/sparse_decode/traits.hpp"

namespace mla::sm_90 {

// Copying: lanes 0..15 copy the first two keys, the others the last two, 16 bytes each at a time.
//
// Dequantising: two keys at a time, in lines of 64 values, which are 128 bytes of a stage. A lane has 16 values of the
// first 256 of a key, and 16 of the last. Lanes 4..7 of each 8 take the second key and another line than the others. So
// eight lanes read and write all banks: the first key's pieces are at even positions, the second's, by the swizzle, at
// odd ones.
template <class Traits>
struct GatherLayout {
  using KvFormat = typename Traits::KvFormat;

  uint32_t token;      // where the addresses of the tokens lie that the lane copies, of a batch's first four
  uint32_t to_scales;  // where the distances from there to the scales lie
  uint32_t copied;     // within a raw stage: the first 16 bytes that it copies
  uint32_t stored;     // its values of the first 256
  uint32_t rope;       // 16 bytes of bf16 values; eight lanes share a key
  uint32_t scale;      // of its values
  uint32_t seventh;    // of its last values: there are seven scales of seven lines of 64
  uint32_t to;         // within a KV stage: where the first pair's values go
  uint32_t row;        // and where the bf16 values go

  // The distance in a stage from a key to the one `keys` further on: as many rows of 128 bytes, and as many 16-byte
  // positions of the swizzle. It is applied by xor; `keys` is a power of two below 8.
  MLA_DEVICE static constexpr uint32_t step(uint32_t keys) { return keys * (128 + 16); }

  // `first` is the number of the warp's first key within a stage.
  MLA_DEVICE GatherLayout(uint32_t lane, uint32_t first, uint32_t scratch) {
    token = scratch + Traits::SCRATCH_ROWS + lane / 16 * 16;
    to_scales = scratch + Traits::SCRATCH_SCALES + lane / 16 * 8;
    copied = lane / 16 * 1024 + lane % 16 * 16;
    const uint32_t key = lane / 4 % 2;
    const uint32_t line = lane / 8 ^ key;  // and four more
    const uint32_t piece = lane % 4 * 2;
    const uint32_t keys = (first / 8 * Traits::GROUP_BYTES) ^ step(first % 8);
    stored = key * 512 + line * 64 + piece * 8;
    to = (keys ^ (key * 128 + (piece ^ key) * 16)) + line * Traits::BLOCK_BYTES;
    const uint32_t tail = Traits::TAILS + key * KvFormat::TAIL;
    if constexpr (KvFormat::SCALES_APART)
      scale = tail + KvFormat::TAIL_SCALES + line;
    else
      scale = tail + line / 2 * 4;
    seventh = scale + (line < 3 ? 4 : 3);
    const uint32_t rope_key = lane / 8, part = lane % 8;
    if constexpr (KvFormat::SCALES_APART)
      rope = part < 4 ? rope_key * 512 + 448 + part * 16 : Traits::TAILS + rope_key * KvFormat::TAIL + (part - 4) * 16;
    else
      rope = Traits::TAILS + rope_key * KvFormat::TAIL + 16 + part * 16;
    row = (keys ^ (rope_key * 128 + (part ^ rope_key) * 16)) + KvFormat::LATENT / 64 * Traits::BLOCK_BYTES;
  }

  // Returns whether the lane's values of the last 256 exist: there may be no eighth line.
  MLA_DEVICE bool has_last() const { return KvFormat::LATENT == 512 || seventh != scale + 3; }

  // Keeps the members in registers, so that the compiler does not compute them anew.
  MLA_DEVICE void keep() {
    pin_together(copied, stored, rope, scale, to, row, token);
    if constexpr (KvFormat::SCALES_APART) pin_together(seventh, to_scales);
  }
};

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
    if constexpr (KvFormat::SCALES_APART)
      scale = ld_shared_u8(pair + (number % 2 == 0 ? layout.scale : layout.seventh));
    else
      scale = ld_shared<uint32_t>(pair + layout.scale + number % 2 * 8);
  }

  MLA_DEVICE void to_bf16(uint32_t (&values)[8]) const {
    if constexpr (KvFormat::ARBITRARY_SCALE)
      dequant_fp32_scale(stored, bit_cast<float>(scale), values);
    else
      dequant_e8m0_scale(stored, scale, values);
  }
};

}  // namespace mla::sm_90
