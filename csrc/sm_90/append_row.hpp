// A bf16 row that append_kv stores as it comes, apart from rotation, and the indices it reads on this arch.
#pragma once

#include "mla/append_kv.hpp"
#include "sm_90/wave.hpp"

namespace sm_90 {

// An index as it lies in memory: made into a number where it is asked for, it would be waited for there.
struct RawIndex {
  uint32_t low = ~0u, high = ~0u;

  MLA_DEVICE void load(const void* array, int wide, int64_t at) {
    const auto* words = static_cast<const uint32_t*>(array) + (at << wide);
    low = words[0];
    high = wide != 0 ? words[1] : 0;
  }

  // The slot, or -1 where nothing is to be written.
  MLA_DEVICE int slot(const mla::AppendKvParams& p) const {
    return high == 0 && low < static_cast<uint32_t>(p.slots) ? static_cast<int>(low) : -1;
  }
};

// Where a row begins in the inputs.
struct RowPlaces {
  const uint8_t* latent;
  const uint8_t* rope;
};

// A bf16 row as its warp holds it: 16 bytes of latents twice and a pair of rope values with its angle to a lane.
struct AppendRow {
  using Any = mla::AppendRow<Wave>;
  using Octet = mla::Vec<uint32_t, 4>;
  using Params = mla::AppendKvParams;

  Octet latent[2];
  uint32_t low, high;  // a pair of rope values; neighbours are both in `low`
  uint32_t cos, sin;

  // Whether this call's rows are such. Of addresses only the last bits count.
  MLA_DEVICE static bool fits(const Params& p) {
    static_assert(mla::ENCODED_BF16 == 0, "append_kv: what is not bf16 has a bit set");
    const int kind = p.in_type | p.latent_encoding | p.rope_encoding | p.tile | p.pad;
    const uint32_t octets = bits(p.kv_c) | bits(p.kv_c_stride) * 2 | bits(p.kv_cache) | bits(p.block_bytes) |
                            p.latent_offset | p.latent_stride | p.latent_per_block | p.latent * 2;
    const uint32_t pairs =
        bits(p.k_pe) | bits(p.k_pe_stride) * 2 | p.rope_offset | p.rope_stride | p.rope_per_block | p.rope * 2;
    return kind == 0 && p.kv_descale == nullptr && (octets & 15) == 0 && (pairs & 3) == 0 && p.latent <= 512 &&
           p.rope <= 64;
  }

  MLA_DEVICE static RowPlaces inputs(const Params& p, int token) {
    return {static_cast<const uint8_t*>(p.kv_c) + token * p.kv_c_stride * 2,
            static_cast<const uint8_t*>(p.k_pe) + token * p.k_pe_stride * 2};
  }

  MLA_DEVICE void load(const Params& p, const RowPlaces& from, int lane) {
    load_latent(p, from, lane);
    load_rope(p, from, lane);
  }
  MLA_DEVICE void load_latent(const Params& p, const RowPlaces& from, int lane) {
    for (int i = 0; i < 2; ++i)
      if (lane * 8 + 256 * i < p.latent) latent[i] = reinterpret_cast<const Octet*>(from.latent)[lane + 32 * i];
  }
  MLA_DEVICE void load_rope(const Params& p, const RowPlaces& from, int lane) {
    if (2 * lane >= p.rope) return;
    if (Any::neighbours(p)) {
      low = reinterpret_cast<const uint32_t*>(from.rope)[lane];
    } else {
      low = reinterpret_cast<const uint16_t*>(from.rope)[lane];
      high = reinterpret_cast<const uint16_t*>(from.rope)[lane + p.rope / 2];
    }
  }

  // Apart from the rest, for it needs the token's position; only of a token with a slot, others may have any.
  MLA_DEVICE void load_angle(const Params& p, uint32_t position, int lane) {
    if (p.cos_sin == nullptr || 2 * lane >= p.rope) return;
    const int64_t at = static_cast<int64_t>(position) * p.cos_sin_stride + lane;
    cos = mla::load_bits(p.cos_sin, p.angle_type, at);
    sin = mla::load_bits(p.cos_sin, p.angle_type, at + p.rope / 2);
  }

  MLA_DEVICE void store(const Params& p, int slot, int lane) {
    store_latent(p, slot, lane);
    store_rope(p, slot, lane);
  }

  MLA_DEVICE void store_latent(const Params& p, int slot, int lane) {
    auto* latents =
        reinterpret_cast<Octet*>(field(p, slot, p.latent_per_block, p.latent_stride, p.latent_offset)) + lane;
    for (int i = 0; i < 2; ++i) {
      if (holds_nan(latent[i])) make_quiet(latent[i]);
      if (lane * 8 + 256 * i < p.latent) latents[32 * i] = latent[i];
    }
  }

  MLA_DEVICE void store_rope(const Params& p, int slot, int lane) {
    if (2 * lane >= p.rope) return;
    asm volatile("" : "+r"(low), "+r"(high));  // taken apart any earlier they would be waited for there
    float a = mla::bit_cast<float>(low << 16);
    float b = mla::bit_cast<float>(Any::neighbours(p) ? low & 0xffff0000 : high << 16);
    if (p.cos_sin != nullptr)
      mla::rotate<Wave>(a, b, mla::value_of<Wave>(cos, p.angle_type), mla::value_of<Wave>(sin, p.angle_type));
    const uint32_t a_bits = mla::encode_bf16(mla::bit_cast<uint32_t>(a));
    const uint32_t b_bits = mla::encode_bf16(mla::bit_cast<uint32_t>(b));
    uint8_t* ropes = field(p, slot, p.rope_per_block, p.rope_stride, p.rope_offset);
    if (Any::neighbours(p)) {
      reinterpret_cast<uint32_t*>(ropes)[lane] = a_bits | b_bits << 16;
    } else {
      reinterpret_cast<uint16_t*>(ropes)[lane] = static_cast<uint16_t>(a_bits);
      reinterpret_cast<uint16_t*>(ropes)[lane + p.rope / 2] = static_cast<uint16_t>(b_bits);
    }
  }

 private:
  template <class T>
  MLA_DEVICE static uint32_t bits(T* address) {
    return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address));
  }
  MLA_DEVICE static uint32_t bits(int64_t size) { return static_cast<uint32_t>(size); }

  MLA_DEVICE static uint8_t* field(const Params& p, int slot, int per_block, int stride, int offset) {
    return mla::AppendKv<Wave, 1>::record_of(p, slot).field(per_block, stride, offset);
  }

  // In either half of a word NaN is what is past infinity.
  MLA_DEVICE static bool holds_nan(const Octet& words) {
    uint32_t past = 0;
    for (int i = 0; i < 4; ++i) past |= (words[i] & 0x7fff7fff) + 0x007f007f;
    return (past & 0x80008000) != 0;
  }

  // NaN becomes the positive quiet NaN, as everywhere.
  MLA_DEVICE static void make_quiet(Octet& words) {
    for (int i = 0; i < 4; ++i) {
      if ((words[i] & 0x7fff) > 0x7f80) words[i] = (words[i] & 0xffff0000) | 0x7fc0;
      if ((words[i] & 0x7fffffff) >= 0x7f810000) words[i] = (words[i] & 0xffff) | 0x7fc00000;
    }
  }
};

}  // namespace sm_90
