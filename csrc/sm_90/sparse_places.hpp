// Which bytes of four keys each lane of a warp copies, dequantises and stores, and what it makes of them.
#pragma once

#include "sm_90/dequantise.hpp"
#include "sm_90/sparse_policy.hpp"

namespace mla::sm90 {

// Copied: lanes 0..15 the first two keys, the others the last two, 16 bytes each at a time.
//
// Dequantised: two keys at a time, 16 values a lane of the first 256 of a key, and 16 of the last, in lines of 64,
// which are 128 bytes of a stage. Lanes 4..7 of each 8 take the second key and another line than the others: so eight
// lanes read and write all banks, the first key's pieces at even places and the second's, by the swizzle, at odd ones.
template <class Policy>
struct SparsePlaces {
  using Record = typename Policy::Record;

  uint32_t token;    // the addresses of the tokens that it copies, of a batch's first four
  uint32_t scales;   // and what is from there to their scales
  uint32_t copied;   // in a slot: the first of its 16 bytes
  uint32_t stored;   // its values of the first 256
  uint32_t rope;     // 16 bytes of bf16 values, of eight lanes a key
  uint32_t scale;    // of its values
  uint32_t seventh;  // of its last values: there are seven scales of seven lines of 64
  uint32_t to;       // in a stage: of the first pair's values
  uint32_t row;      // and of the bf16 values

  // From a key's place in a stage to that of the key `keys` on: as many rows of 128 bytes, and in the swizzle as many
  // pieces. To be xored; a power of two below 8.
  MLA_DEVICE static constexpr uint32_t on(uint32_t keys) { return keys * (128 + 16); }

  // `first`: the number of the warp's first key within a stage.
  MLA_DEVICE SparsePlaces(uint32_t lane, uint32_t first, uint32_t notes) {
    token = notes + Policy::NOTES_ROWS + lane / 16 * 16;
    scales = notes + Policy::NOTES_SCALES + lane / 16 * 8;
    copied = lane / 16 * 1024 + lane % 16 * 16;
    const uint32_t key = lane / 4 % 2;
    const uint32_t line = lane / 8 ^ key;  // and four more
    const uint32_t piece = lane % 4 * 2;
    const uint32_t keys = (first / 8 * Policy::GROUP_BYTES) ^ on(first % 8);
    stored = key * 512 + line * 64 + piece * 8;
    to = (keys ^ (key * 128 + (piece ^ key) * 16)) + line * Policy::BLOCK_BYTES;
    const uint32_t tail = Policy::TAILS + key * Record::TAIL;
    if constexpr (Record::SCALES_APART)
      scale = tail + Record::TAIL_SCALES + line;
    else
      scale = tail + line / 2 * 4;
    seventh = scale + (line < 3 ? 4 : 3);
    const uint32_t rope_key = lane / 8, part = lane % 8;
    if constexpr (Record::SCALES_APART)
      rope = part < 4 ? rope_key * 512 + 448 + part * 16 : Policy::TAILS + rope_key * Record::TAIL + (part - 4) * 16;
    else
      rope = Policy::TAILS + rope_key * Record::TAIL + 16 + part * 16;
    row = (keys ^ (rope_key * 128 + (part ^ rope_key) * 16)) + Record::LATENT / 64 * Policy::BLOCK_BYTES;
  }

  // Whether a lane's values of the last 256 are values: there may be no eighth line.
  MLA_DEVICE bool has_last() const { return Record::LATENT == 512 || seventh != scale + 3; }

  // Kept in registers: the compiler may not compute them anew.
  MLA_DEVICE void keep() {
    asm volatile("" : "+r"(copied), "+r"(stored), "+r"(rope), "+r"(scale), "+r"(to), "+r"(row), "+r"(token));
    if constexpr (Record::SCALES_APART) asm volatile("" : "+r"(seventh), "+r"(scales));
  }
};

// 16 values of a lane as they are stored, and their scale. NUMBER: 0 and 1 of the first pair's first and last 256, 2
// and 3 of the second's.
template <class Policy>
struct SparseUnit {
  using Record = typename Policy::Record;

  uint32_t stored[4];
  uint32_t scale;

  MLA_DEVICE void load(uint32_t number, uint32_t slot, const SparsePlaces<Policy>& places) {
    load16(slot + places.stored + number / 2 * 1024 + number % 2 * 256, stored);
    const uint32_t pair = slot + number / 2 * (2 * Record::TAIL);
    if constexpr (Record::SCALES_APART)
      asm volatile("ld.shared.u8 %0, [%1];"
                   : "=r"(scale)
                   : "r"(pair + (number % 2 == 0 ? places.scale : places.seventh))
                   : "memory");
    else
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scale) : "r"(pair + places.scale + number % 2 * 8) : "memory");
  }

  MLA_DEVICE void dequantised(uint32_t (&values)[8]) const {
    dequantise(stored, Record::SPLIT ? bit_cast<float>(scale) : power_of_two(scale), values);
  }
};

}  // namespace mla::sm90
