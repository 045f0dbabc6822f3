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

// Where a token's codes and scales go.
struct RecordPlace {
  uint8_t* codes = nullptr;
  uint8_t* scales;
  MLA_DEVICE bool exists() const { return codes != nullptr; }
};

// The row as its warp holds it: each lane 16 neighbouring values. In shared memory the rope part follows the latents,
// wherever they end. `bytes_of_angle` is the size of a cosine, 0 without rotation.
template <class Format, int bytes_of_angle>
struct RecordRow {
  using Params = mla::AppendKvParams;
  using Place = RecordPlace;
  static constexpr int angle_bytes = bytes_of_angle;
  static constexpr bool rotated = angle_bytes != 0;
  static_assert(Format::ROTATES || !rotated, "append_kv: the record has no rope values");
  static constexpr uint32_t angle_at = 1024;
  MLA_DEVICE static uint32_t rope_at(const Params& p) { return p.latent * 2; }

  SixteenValues values;
  float reciprocal;          // of the divisor of scales
  uint32_t low, apart;       // where in a RowBuffer the pair lies that the lane rotates, and how far its values are apart
  uint32_t cosine, to_sine;  // the same of its angle

  MLA_DEVICE explicit RecordRow(const Params& p) : reciprocal(1.0f / p.divisor) {
    const int lane = mla::thread_id() % 32;
    const RopePair pair(p, lane);
    low = rope_at(p) + pair.first;
    apart = pair.apart;
    cosine = angle_at + lane * angle_bytes;
    to_sine = p.rope / 2 * angle_bytes;
    if (2 * lane < p.rope) return;
    // There is no pair for this lane, so it rotates what lies behind the angles.
    low = cosine = angle_at + lane * 8;
    apart = to_sine = 4;
  }
  // Keeps the members in registers, so that the compiler does not compute them anew.
  MLA_DEVICE void keep() {
    pin_registers(reciprocal);
    if constexpr (rotated) pin_registers(low, apart, cosine, to_sine);
  }

  MLA_DEVICE void read(const Params& p, uint32_t at, int lane) {
    if constexpr (rotated) {
      rotate(p, at);
      __syncwarp();
    }
    ld_shared_v4(at + lane * 32, values[0], values[1], values[2], values[3]);
    ld_shared_v4(at + lane * 32 + 16, values[4], values[5], values[6], values[7]);
  }

  MLA_DEVICE static Place place(const Params& p, int slot) {
    const mla::Record record = mla::AppendKv<Wave, 1>::record_of(p, slot);
    return {record.field(p.latent_per_block, p.latent_stride, p.latent_offset),
            record.field(p.scale_per_block, p.scale_stride, p.scale_offset)};
  }

  // The row as it is stored, but for where.
  struct Encoded {
    Format format;
    uint32_t codes[Format::CODE_WORDS];

    MLA_DEVICE void store(const Place& to, int lane) const {
      using Codes = mla::Vec<uint32_t, Format::CODE_WORDS>;
      Codes words;
      for (int i = 0; i < Format::CODE_WORDS; ++i) words[i] = codes[i];
      reinterpret_cast<Codes*>(global_pointer(to.codes))[lane] = words;
      if (lane % LANES == 0) format.store_scale(global_pointer(to.scales), lane / LANES);
    }
  };

  MLA_DEVICE Encoded encoded(const Params& p) const {
    Encoded made{Format(scale_of_tile(p, reciprocal, largest_of_tile())), {}};
    made.format.encode([&](int i) { return i % 2 == 0 ? bf16_low(values[i / 2]) : bf16_high(values[i / 2]); },
                       made.codes);
    return made;
  }

  MLA_DEVICE void store(const Params& p, const Place& to, int lane) const { encoded(p).store(to, lane); }

 private:
  static constexpr int LANES = Format::TILE / 16;  // that share a scale

  // Rotates a pair a lane in shared memory, without a branch: behind one, warps are not known to be converged.
  MLA_DEVICE void rotate(const Params& p, uint32_t at) const {
    const uint32_t first = at + low, second = first + apart, cos_at = at + cosine;
    float a = bit_cast<float>(ld_shared_u16(first) << 16), b = bit_cast<float>(ld_shared_u16(second) << 16);
    mla::rotate_fused<Wave>(a, b, angle(p, cos_at), angle(p, cos_at + to_sine));
    const uint32_t packed = Wave::pack_bf16(a, b);
    st_shared_u16(first, packed & 0xffff);
    st_shared_u16(second, packed >> 16);
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
