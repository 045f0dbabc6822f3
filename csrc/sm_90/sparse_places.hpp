// Which bytes of two keys each lane of a warp copies, dequantises and stores, and what it makes of them.
#pragma once

#include "sm_90/dequantise.hpp"
#include "sm_90/sparse_policy.hpp"

namespace mla::sm90 {

// Copied: lanes 0..15 the first key, the others the second, 16 bytes each at a time.
//
// Dequantised: 16 values a lane of the first 256 of a key, and 16 of the last, in lines of 64, which are 128 bytes of a
// stage. Lanes 4..7 of each 8 take the second key and another line than the others: so eight lanes read and write all
// banks, the first key's pieces at even places and the second's, by the swizzle, at odd ones.
template <class Policy>
struct SparsePlaces {
  using Record = typename Policy::Record;

  uint32_t token;    // the address of the token that it copies, of a batch's first pair
  uint32_t copied;   // in a pair: the first of its 16 bytes
  uint32_t tail;     // and where its key's tail begins
  uint32_t stored;   // its values of the first 256
  uint32_t rope;     // lanes 0..15: 16 bytes of bf16 values, of eight lanes a key
  uint32_t scale;    // of its values
  uint32_t seventh;  // of its last values: there are seven scales of seven lines of 64
  uint32_t to;       // in a stage: of the first pair's values
  uint32_t row;      // and of the bf16 values

  // `first`: the number of the warp's first key within a stage.
  MLA_DEVICE SparsePlaces(uint32_t lane, uint32_t first, uint32_t notes) {
    token = notes + Policy::NOTES_ROWS + lane / 16 * 8;
    copied = lane / 16 * 512 + lane % 16 * 16;
    tail = 1024 + lane / 16 * Record::TAIL;
    const uint32_t key = lane / 4 % 2;
    const uint32_t line = lane / 8 ^ key;  // and four more
    const uint32_t piece = lane % 4 * 2;
    // Four keys on are as many rows of 128 bytes, and in the swizzle as many pieces.
    const uint32_t keys = (first / 8 * Policy::GROUP_BYTES) ^ (first / 4 % 2 * (4 * 128 + 4 * 16));
    stored = key * 512 + line * 64 + piece * 8;
    to = (keys ^ (key * 128 + (piece ^ key) * 16)) + line * Policy::BLOCK_BYTES;
    const uint32_t scales = 1024 + key * Record::TAIL;
    if constexpr (Record::SCALES_APART)
      scale = scales + Record::TAIL_SCALES + line;
    else
      scale = scales + line / 2 * 4;
    seventh = scale + (line < 3 ? 4 : 3);
    const uint32_t rope_key = lane / 8 % 2, part = lane % 8;
    if constexpr (Record::SCALES_APART)
      rope = part < 4 ? rope_key * 512 + 448 + part * 16 : 1024 + rope_key * Record::TAIL + (part - 4) * 16;
    else
      rope = 1024 + rope_key * Record::TAIL + 16 + part * 16;
    row = (keys ^ (rope_key * 128 + (part ^ rope_key) * 16)) + Record::LATENT / 64 * Policy::BLOCK_BYTES;
  }

  // Kept in registers: the compiler may not compute them anew.
  MLA_DEVICE void keep() {
    asm volatile(""
                 : "+r"(copied), "+r"(tail), "+r"(stored), "+r"(rope), "+r"(scale), "+r"(to), "+r"(row), "+r"(token));
    if constexpr (Record::SCALES_APART) asm volatile("" : "+r"(seventh));
  }
};

// A lane's 16 values of the first 256 of its key, or of the last, as they are stored, and their scale.
template <class Policy>
struct SparseHalf {
  using Record = typename Policy::Record;

  uint32_t stored[4];
  uint32_t scale;

  // NUMBER: 0 the first 256, 1 the last.
  template <int NUMBER>
  MLA_DEVICE void load(uint32_t slot, const SparsePlaces<Policy>& places) {
    load16(slot + places.stored + NUMBER * 256, stored);
    if constexpr (Record::SCALES_APART)
      asm volatile("ld.shared.u8 %0, [%1];"
                   : "=r"(scale)
                   : "r"(slot + (NUMBER == 0 ? places.scale : places.seventh))
                   : "memory");
    else
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scale) : "r"(slot + places.scale + NUMBER * 8) : "memory");
  }

  // Whether 2^120 times the scale would be infinite.
  MLA_DEVICE bool large() const { return factor<false>().large; }

  template <bool LARGE>
  MLA_DEVICE void dequantised(uint32_t (&values)[8]) const {
    dequantise<Record::SPLIT, LARGE>(stored, factor<LARGE>(), values);
  }

 private:
  template <bool LARGE>
  MLA_DEVICE Factor factor() const {
    if constexpr (Record::SPLIT)
      return LARGE ? Factor::of_any_large(bit_cast<float>(scale)) : Factor::of_any(bit_cast<float>(scale));
    else
      return LARGE ? Factor::of_power_large(scale) : Factor::of_power(scale);
  }
};

}  // namespace mla::sm90
