// A bf16 row of 512 values that append_kv scales and quantises as a whole, its rope part too: the records of V4.1, and
// V3.2's without a rope part.
//
// A rotated pair is rounded to bf16, in the place that it came from, and quantised from there.
#pragma once

#include "sm_90/append_kv/record_codes.hpp"
#include "sm_90/append_kv/row.hpp"

namespace mla::sm_90 {

// Sixteen values of a lane as they come: two bf16 in a word.
using SixteenValues = uint32_t[8];

// The row as its warp holds it: each lane 16 neighbouring values. In shared memory the rope part follows the latents,
// wherever they end. `bytes_of_angle` is the size of a cosine, 0 without rotation.
template <class Format, int bytes_of_angle>
struct RecordRow {
  using Params = mla::AppendKvParams;
  static constexpr int angle_bytes = bytes_of_angle;
  static constexpr bool rotated = angle_bytes != 0;
  static_assert(Format::ROTATES || !rotated, "append_kv: the record has no rope values");
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

  // The row as it is stored, but for where.
  struct Encoded {
    Format format;
    uint32_t codes[Format::CODE_WORDS];

    MLA_DEVICE void store(const Params& p, int slot, int lane) const {
      const mla::Record record = mla::AppendKv<Wave, 1>::record_of(p, slot);
      using Codes = mla::Vec<uint32_t, Format::CODE_WORDS>;
      auto* row = reinterpret_cast<Codes*>(record.field(p.latent_per_block, p.latent_stride, p.latent_offset));
      Codes words;
      for (int i = 0; i < Format::CODE_WORDS; ++i) words[i] = codes[i];
      row[lane] = words;
      if (lane % LANES == 0)
        format.store_scale(record.field(p.scale_per_block, p.scale_stride, p.scale_offset), lane / LANES);
    }
  };

  MLA_DEVICE Encoded encoded(const Params& p) const {
    Encoded made{Format(mla::tile_scale<Wave>(p, bit_cast<int>(largest_of_tile()))), {}};
    made.format.encode([&](int i) { return i % 2 == 0 ? bf16_low(values[i / 2]) : bf16_high(values[i / 2]); },
                       made.codes);
    return made;
  }

  MLA_DEVICE void store(const Params& p, int64_t slot, int lane) const {
    encoded(p).store(p, static_cast<int>(slot), lane);
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
    mla::rotate_fused<Wave>(a, b, angle(p, cos_at), angle(p, sin_at));
    const uint32_t packed = Wave::pack_bf16(a, b);
    st_shared_u16(low, packed & 0xffff);
    st_shared_u16(high, packed >> 16);
  }
  MLA_DEVICE static float angle(const Params& p, uint32_t at) {
    if constexpr (angle_bytes == 4) return ld_shared<float>(at);
    return mla::value_of<Wave>(ld_shared_u16(at), p.angle_type);
  }

  // NaN where there is one among the values. Magnitudes of bf16 as integers are in order, and NaN's are the largest.
  MLA_DEVICE float largest_of_tile() const {
    uint32_t most[2] = {};  // two chains
#pragma unroll
    for (int i = 0; i < 8; ++i) most[i % 2] = max_u16x2(most[i % 2], values[i] & 0x7fff7fff);
    most[0] = max_u16x2(most[0], most[1]);
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) most[0] = max_u16x2(most[0], __shfl_xor_sync(~0u, most[0], apart));
    return largest_magnitude(bf16_low(most[0]), bf16_high(most[0]));
  }
};

}  // namespace mla::sm_90
