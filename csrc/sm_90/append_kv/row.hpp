// A bf16 row that append_kv stores as it is, apart from rotation of its rope part; and the indices that it reads.
#pragma once

#include "common/append_kv.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm_90 {

// An index as it lies in memory. Widened to a number where it is loaded, it would be waited for there.
struct RawIndex {
  uint32_t low = ~0u, high = ~0u;

  MLA_DEVICE void load(const void* array, int wide, int64_t at) {
    const auto* words = static_cast<const uint32_t*>(array) + (at << wide);
    low = words[0];
    high = wide != 0 ? words[1] : 0;
  }

  MLA_DEVICE static RawIndex at(const void* array, int wide, int64_t at) {
    RawIndex index;
    index.load(array, wide, at);
    return index;
  }

  // The slot, or -1 where nothing is to be written.
  MLA_DEVICE int slot(const mla::AppendKvParams& p) const {
    return high == 0 && low < static_cast<uint32_t>(p.slots) ? static_cast<int>(low) : -1;
  }
};

// Whether a call's rows are plain: bf16 in and out, aligned to 16 bytes, less than 2 GB apart. Only the last bits of
// addresses matter.
struct PlainRowFits {
  using Params = mla::AppendKvParams;

  MLA_DEVICE static bool all(const Params& p) {
    static_assert(mla::ENCODED_BF16 == 0, "append_kv: every encoding but bf16 has a bit set");
    const int kind = p.in_type | p.latent_encoding | p.rope_encoding | p.tile | p.pad;
    const int apart = (p.latent_stride ^ p.rope_stride) | (p.latent_per_block ^ p.rope_per_block);
    const uint32_t octets = bits(p.kv_c) | bits(p.kv_c_stride) * 2 | bits(p.kv_cache) | bits(p.block_bytes) |
                            p.latent_offset | p.latent_stride | p.latent_per_block | p.latent * 2;
    const uint32_t pairs = bits(p.k_pe) | bits(p.k_pe_stride) * 2 | p.rope_offset | p.rope * 2;
    const int angle_bytes = p.angle_type == mla::ENCODED_FP32 ? 4 : 2;
    const int64_t longest = p.kv_c_stride | p.k_pe_stride | p.cos_sin_stride;
    const uint32_t angles = bits(p.cos_sin) | bits(p.cos_sin_stride) * angle_bytes;
    return (kind | apart) == 0 && p.kv_descale == nullptr && (octets & 15) == 0 && (pairs & 3) == 0 &&
           (angles & (2 * angle_bytes - 1)) == 0 && longest < 1 << 29 && p.latent <= 512 && p.rope <= 64;
  }

 private:
  template <class T>
  MLA_DEVICE static uint32_t bits(T* address) {
    return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address));
  }
  MLA_DEVICE static uint32_t bits(int64_t size) { return static_cast<uint32_t>(size); }
};

// Which two rope values a lane has, as byte offsets: neighbours, or one of each half. Without rotation either will do.
struct RopePair {
  bool neighbours;
  int first, apart;

  MLA_DEVICE RopePair(const mla::AppendKvParams& p, int lane)
      : neighbours(p.cos_sin == nullptr || p.interleaved != 0),
        first(lane * (neighbours ? 4 : 2)),
        apart(neighbours ? 2 : p.rope) {}
};

// Where a plain row goes: the offset of its latents from the cache's beginning.
struct PlainPlace {
  int64_t latents = -1;
  MLA_DEVICE bool exists() const { return latents >= 0; }
};

// A bf16 row as its warp holds it: each lane has twice 16 bytes of latents and a pair of rope values with its angle.
// `bytes_of_angle` is the size of a cosine, 0 without rotation.
template <int bytes_of_angle>
struct PlainRow {
  using Octet = mla::Vec<uint32_t, 4>;
  using Params = mla::AppendKvParams;
  using Place = PlainPlace;
  static constexpr int angle_bytes = bytes_of_angle;
  static constexpr bool rotated = angle_bytes != 0;
  static constexpr uint32_t angle_at = 1152;  // in a RowBuffer
  MLA_DEVICE static uint32_t rope_at(const Params&) { return 1024; }

  Octet latent[2];
  uint32_t low, high;
  uint32_t cos, sin;

  MLA_DEVICE explicit PlainRow(const Params&) {}
  MLA_DEVICE void keep() {}

  MLA_DEVICE void load_latent(const Params& p, int token, int lane) {
    const auto* from = static_cast<const uint8_t*>(p.kv_c) + token * p.kv_c_stride * 2 + lane * 16;
    for (int i = 0; i < 2; ++i)
      if (lane * 8 + 256 * i < p.latent) latent[i] = *reinterpret_cast<const Octet*>(from + 512 * i);
  }
  MLA_DEVICE void load_rope(const Params& p, int token, int lane) {
    if (2 * lane >= p.rope) return;
    const RopePair pair(p, lane);
    const auto* from = static_cast<const uint8_t*>(p.k_pe) + token * p.k_pe_stride * 2 + pair.first;
    low = *reinterpret_cast<const uint16_t*>(from);
    high = *reinterpret_cast<const uint16_t*>(from + pair.apart);
  }

  // Loads cosine and sine. It is separate because it needs the token's position, which is valid only for a token with a
  // slot.
  MLA_DEVICE void load_angle(const Params& p, uint32_t position, int lane) {
    if (!rotated || 2 * lane >= p.rope) return;
    const int64_t at = static_cast<int64_t>(position) * p.cos_sin_stride + lane;
    cos = mla::load_bits(p.cos_sin, angle_type(p), at);
    sin = mla::load_bits(p.cos_sin, angle_type(p), at + p.rope / 2);
  }

  MLA_DEVICE static Place place(const Params& p, int slot) {
    const mla::Record record = mla::AppendKv<Wave, 1>::record_of(p, slot);
    return {record.field(p.latent_per_block, p.latent_stride, p.latent_offset) - p.kv_cache};
  }

  // Reads the row's RowBuffer.
  MLA_DEVICE void read(const Params& p, uint32_t at, int lane) {
    for (int i = 0; i < 2; ++i) ld_shared_v4(at + lane * 16 + 512 * i, latent[i].data);
    const RopePair pair(p, lane);
    low = ld_shared_u16(at + rope_at(p) + pair.first);
    high = ld_shared_u16(at + rope_at(p) + pair.first + pair.apart);
    const uint32_t cos_at = at + angle_at + lane * angle_bytes, sin_at = cos_at + p.rope / 2 * angle_bytes;
    if constexpr (angle_bytes == 4) {
      cos = ld_shared<uint32_t>(cos_at);
      sin = ld_shared<uint32_t>(sin_at);
    } else if constexpr (angle_bytes == 2) {
      cos = ld_shared_u16(cos_at);
      sin = ld_shared_u16(sin_at);
    }
  }

  MLA_DEVICE void store(const Params& p, const Place& to, int lane) {
    uint32_t pair = rope(p);
    Nans nans;
    nans.see(latent[0]);
    nans.see(latent[1]);
    nans.see(0, pair);
    if (nans.any()) {
      make_quiet(latent[0]);
      make_quiet(latent[1]);
      pair = quiet(pair);
    }
    put_latent(p, to, lane);
    put_rope(p, to, pair, lane);
  }
  MLA_DEVICE void store_latent(const Params& p, const Place& to, int lane) {
    make_quiet(latent[0]);
    make_quiet(latent[1]);
    put_latent(p, to, lane);
  }
  MLA_DEVICE void store_rope(const Params& p, const Place& to, int lane) { put_rope(p, to, quiet(rope(p)), lane); }

 private:
  MLA_DEVICE static int angle_type(const Params& p) { return angle_bytes == 4 ? mla::ENCODED_FP32 : p.angle_type; }

  // The rotated pair as it is stored, except that a NaN may have any bits.
  MLA_DEVICE uint32_t rope(const Params& p) {
    if constexpr (!rotated) return high << 16 | low;
    pin_registers(low, high);  // used any earlier, they would be waited for there
    float a = mla::bit_cast<float>(low << 16), b = mla::bit_cast<float>(high << 16);
    mla::rotate<Wave>(a, b, mla::value_of<Wave>(cos, angle_type(p)), mla::value_of<Wave>(sin, angle_type(p)));
    return Wave::pack_bf16(a, b);
  }

  MLA_DEVICE void put_latent(const Params& p, const Place& to, int lane) const {
    uint8_t* latents = p.kv_cache + to.latents + static_cast<uint32_t>(lane) * 16;
    for (int i = 0; i < 2; ++i)
      if (lane * 8 + 256 * i < p.latent) *reinterpret_cast<Octet*>(latents + 512 * i) = latent[i];
  }
  MLA_DEVICE static void put_rope(const Params& p, const Place& to, uint32_t pair, int lane) {
    if (2 * lane >= p.rope) return;
    const RopePair place(p, lane);
    uint8_t* ropes = p.kv_cache + to.latents + (p.rope_offset - p.latent_offset + place.first);
    if (place.neighbours) {
      *reinterpret_cast<uint32_t*>(ropes) = pair;
    } else {
      *reinterpret_cast<uint16_t*>(ropes) = static_cast<uint16_t>(pair);
      *reinterpret_cast<uint16_t*>(ropes + place.apart) = static_cast<uint16_t>(pair >> 16);
    }
  }

  // Whether there may be a NaN among the values seen: times zero, NaN and infinity become NaN and all else becomes
  // zero.
  struct Nans {
    uint32_t sums[4] = {};  // four chains, so that none waits for another

    MLA_DEVICE void see(int i, uint32_t pair) { sums[i] = fma_bf16x2(pair, 0, sums[i]); }
    MLA_DEVICE void see(const Octet& words) {
      for (int i = 0; i < 4; ++i) see(i, words[i]);
    }
    MLA_DEVICE bool any() const { return ((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7fff7fff) != 0; }
  };

  // A NaN becomes the positive quiet NaN, as in every kernel.
  MLA_DEVICE static uint32_t quiet(uint32_t pair) {
    if ((pair & 0x7fff) > 0x7f80) pair = (pair & 0xffff0000) | 0x7fc0;
    if ((pair & 0x7fffffff) >= 0x7f810000) pair = (pair & 0xffff) | 0x7fc00000;
    return pair;
  }
  MLA_DEVICE static void make_quiet(Octet& words) {
    for (int i = 0; i < 4; ++i) words[i] = quiet(words[i]);
  }
};

// Calls `body` with the Row of this call's angles. Rows without any come last: in this order ptxas finds the warps of all
// three converged, and keeps what they share in uniform registers.
template <template <int> class Row, class Body>
MLA_DEVICE void with_row_of(const mla::AppendKvParams& p, Body body) {
  const bool rotated = p.cos_sin != nullptr;
  if (rotated && p.angle_type == mla::ENCODED_FP32)
    body(Row<4>(p));
  else if (rotated)
    body(Row<2>(p));
  else
    body(Row<0>(p));
}

}  // namespace mla::sm_90
