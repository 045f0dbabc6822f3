// Which bytes of two keys each lane of a warp copies, dequantises and stores, and what it makes of them.
#pragma once

#include "sm_90/dequantise.hpp"
#include "sm_90/sparse_policy.hpp"

namespace mla::sm90 {

// Copied: lanes 0..15 the first key, the others the second, 16 bytes each at a time.
//
// Dequantised: 16 values a lane of the first 256 of a key, and 16 of the last, in lines of 64, which are 128 bytes of a
// stage. Either side by side, lanes 4..7 of each 8 of the second key and another line than the others: so eight lanes
// read and write all banks, the first key's pieces at even places and the second's, by the swizzle, at odd ones. Or,
// where they are stored in another block, too, in two runs of eight, so that eight lanes store a line at once: on that
// way a store that fills half of each 32 bytes costs as much as one that fills them. Every second eight lanes begin
// with the other line of their 128 values: so 16 lanes read all banks.
template <class Policy>
struct SparsePlaces {
  using Record = typename Policy::Record;
  static constexpr bool RUNS = Policy::PAIRED;
  static constexpr int SCALES = RUNS && Record::SCALES_APART ? 2 : 1;  // of a lane's 16 values

  uint32_t token;      // the address of the token that it copies, of a batch's first pair
  uint32_t copied;     // in a pair: the first of its 16 bytes
  uint32_t tail;       // and where its key's tail begins
  uint32_t stored[2];  // its values of the first 256, or its runs of them
  uint32_t rope;       // lanes 0..15: 16 bytes of bf16 values, of eight lanes a key
  uint32_t scale[2];   // of its values
  uint32_t seventh;    // of the first of its last: there are seven scales of seven lines of 64
  uint32_t to[2];      // in a stage: of the first pair's values
  uint32_t row;        // and of the bf16 values

  // `half`: which four of a warp's eight keys of a stage this block brings.
  MLA_DEVICE SparsePlaces(uint32_t lane, uint32_t warp, uint32_t half, uint32_t notes) {
    token = notes + Policy::NOTES_ROWS + lane / 16 * 8;
    copied = lane / 16 * 512 + lane % 16 * 16;
    tail = 1024 + lane / 16 * Record::TAIL;
    const uint32_t odd = lane / 8 % 2;
    const uint32_t key = RUNS ? lane / 16 : lane / 4 % 2;
    const uint32_t line[2] = {RUNS ? odd * 3 : lane / 8 ^ key, 1 + odd};  // and four more
    const uint32_t piece = RUNS ? lane % 8 : lane % 4 * 2;
    // The other half: four rows of 128 bytes on, and in the swizzle as many pieces.
    const uint32_t keys = warp * (Policy::WARP_KEYS * 128) ^ half * (4 * 128 + 4 * 16);
    const uint32_t scales = 1024 + key * Record::TAIL;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      stored[i] = key * 512 + line[i] * 64 + piece * 8;
      to[i] = (keys ^ (key * 128 + (piece ^ key) * 16)) + line[i] * Policy::BLOCK_BYTES;
      if constexpr (Record::SCALES_APART)
        scale[i] = scales + Record::TAIL_SCALES + line[i];
      else
        scale[i] = scales + line[0] / 2 * 4;
    }
    seventh = scale[0] + (line[0] < 3 ? 4 : 3);
    const uint32_t rope_key = odd, part = lane % 8;
    if constexpr (Record::SCALES_APART)
      rope = part < 4 ? rope_key * 512 + 448 + part * 16 : 1024 + rope_key * Record::TAIL + (part - 4) * 16;
    else
      rope = 1024 + rope_key * Record::TAIL + 16 + part * 16;
    row = (keys ^ (rope_key * 128 + (part ^ rope_key) * 16)) + Record::LATENT / 64 * Policy::BLOCK_BYTES;
  }

  // Kept in registers: the compiler may not compute them anew.
  MLA_DEVICE void keep() {
    asm volatile(""
                 : "+r"(copied), "+r"(tail), "+r"(stored[0]), "+r"(stored[1]), "+r"(rope), "+r"(scale[0]), "+r"(to[0]),
                   "+r"(to[1]), "+r"(row));
    if constexpr (SCALES == 2) asm volatile("" : "+r"(scale[1]), "+r"(seventh));
  }
};

// A lane's 16 values of the first 256 of its key, or of the last, as they are stored, and their scales.
template <class Policy>
struct SparseHalf {
  using Record = typename Policy::Record;
  using Places = SparsePlaces<Policy>;

  uint32_t stored[4];
  uint32_t scale[Places::SCALES];

  // NUMBER: 0 the first 256, 1 the last.
  template <int NUMBER>
  MLA_DEVICE void load(uint32_t slot, const Places& places) {
    if constexpr (Places::RUNS) {
      load8(slot + places.stored[0] + NUMBER * 256, stored);
      load8(slot + places.stored[1] + NUMBER * 256, stored + 2);
    } else {
      load16(slot + places.stored[0] + NUMBER * 256, stored);
    }
    if constexpr (Record::SCALES_APART) {
      const uint32_t at = NUMBER == 0 ? slot + places.scale[0] : slot + places.seventh;
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale[0]) : "r"(at) : "memory");
      if constexpr (Places::SCALES == 2)
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale[1]) : "r"(slot + places.scale[1] + NUMBER * 4) : "memory");
    } else {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scale[0]) : "r"(slot + places.scale[0] + NUMBER * 8) : "memory");
    }
  }

  // Whether 2^120 times a scale would be infinite.
  MLA_DEVICE bool large() const {
    bool any = factor<false>(scale[0]).large;
    if constexpr (Places::SCALES == 2) any = any || factor<false>(scale[1]).large;
    return any;
  }

  template <bool LARGE>
  MLA_DEVICE void dequantised(uint32_t (&values)[8]) const {
    if constexpr (Places::SCALES == 1) {
      dequantise<Record::SPLIT, LARGE, 4>(stored, factor<LARGE>(scale[0]), values);
    } else {
      dequantise<Record::SPLIT, LARGE, 2>(stored, factor<LARGE>(scale[0]), values);
      dequantise<Record::SPLIT, LARGE, 2>(stored + 2, factor<LARGE>(scale[1]), values + 4);
    }
  }

 private:
  template <bool LARGE>
  MLA_DEVICE static Factor factor(uint32_t scale) {
    if constexpr (Record::SPLIT)
      return LARGE ? Factor::of_any_large(bit_cast<float>(scale)) : Factor::of_any(bit_cast<float>(scale));
    else
      return LARGE ? Factor::of_power_large(scale) : Factor::of_power(scale);
  }
};

}  // namespace mla::sm90
