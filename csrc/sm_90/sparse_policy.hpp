// What a sparse decode block of sm_90 looks like beside a decode block: the records, and the memory of its loader.
#pragma once

#include "common/params/sparse_decode_tma.hpp"
#include "common/selection.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/shared_copies.hpp"

namespace mla::sm90 {

// How a selected token is stored, and how four of them lie in a slot of shared memory as they came: [4][512] bytes,
// then their tails of TAIL bytes each. A warp has SLOTS.

// 656 bytes: 512 e4m3 values, four fp32 scales of 128 values each, 64 bf16 values.
struct v32 {
  static constexpr bool STORED = true;  // not as it is multiplied
  static constexpr int DEPTH = 576;
  static constexpr int LATENT = 512;  // e4m3 values
  static constexpr int TOKEN_BYTES = 656;
  static constexpr int TAIL = 144;       // scales, bf16 values
  static constexpr int TAIL_PIECES = 9;  // of 16 bytes, that come with the token
  static constexpr bool SCALES_APART = false;
  static constexpr bool SPLIT = true;  // a scale is any number
  static constexpr int STAGES = 4;
  static constexpr int SLOTS = 4;
};

// 576 bytes: 448 e4m3 values, 64 bf16 values; and behind all tokens of a page 8 bytes each: seven E8M0 scales of 64
// values.
struct dsv4 {
  static constexpr bool STORED = true;
  static constexpr int DEPTH = 512;
  static constexpr int LATENT = 448;
  static constexpr int TOKEN_BYTES = 576;
  static constexpr int TAIL = 80;  // the last 32 bf16 values, scales, and 8 bytes unused
  static constexpr int TAIL_PIECES = 4;
  static constexpr int TAIL_SCALES = 64;  // where the scales lie in it
  static constexpr bool SCALES_APART = true;
  static constexpr bool SPLIT = false;
  static constexpr int STAGES = 4;
  static constexpr int SLOTS = 4;
};

// Rows of bf16 as they are multiplied.
template <int DEPTH_>
struct Bf16Record {
  static constexpr bool STORED = false;
  static constexpr int DEPTH = DEPTH_;
  static constexpr int TOKEN_BYTES = DEPTH_ * 2;
  static constexpr int TAIL = 0;
  static constexpr bool SCALES_APART = false;
  static constexpr int STAGES = 5;
  static constexpr int SLOTS = 0;
};
using bf16x576 = Bf16Record<576>;
using bf16x512 = Bf16Record<512>;

// CLUSTER_: blocks that share the work of bringing a token's keys; of two, each brings half of every stage for both.
template <class Record_, int CLUSTER_>
struct SparsePolicy : DecodePolicy<bf16, Record_::DEPTH, Source::selected,
                                   CLUSTER_ == 2 ? Exchange::keys : Exchange::none, Record_::STAGES> {
  using Record = Record_;
  using Params = SparseDecodeTmaParams;
  using Base = typename SparsePolicy::DecodePolicy;
  static_assert(CLUSTER_ == 1 || (CLUSTER_ == 2 && Record::STORED), "two blocks share the work of dequantising");
  static constexpr int LOADER_WARPS = 4;
  static constexpr int FULL_ARRIVALS = LOADER_WARPS;
  static constexpr int WARP_KEYS = Base::KEYS / LOADER_WARPS;  // of a stage, that are one warp's (of both blocks)
  static constexpr int OWN_KEYS = WARP_KEYS / CLUSTER_;        // that a block's warp brings
  static constexpr int SLOTS = Record::SLOTS;

  // uint32[STAGES][blocks][warps]: a bit for each key of the stage, 1: selected, in the word of the warp that brings
  // it.
  static constexpr int PRESENT_OFFSET = (Base::SHARED_BYTES + 15) / 16 * 16;
  static constexpr int PRESENT_BYTES = CLUSTER_ * LOADER_WARPS * 4;  // of a stage
  static constexpr int NOTES_OFFSET = PRESENT_OFFSET + PRESENT_BYTES * Base::STAGES;
  // A warp's notes: Lists, SparseWork, then of the tokens that were looked up:
  static constexpr int NOTES_PRESENT = 72;                // uint32[16]: see SparseLoader::present_at
  static constexpr int NOTES_INDICES = 144;               // int32[32], of the next batch
  static constexpr int NOTES_ROWS = NOTES_INDICES + 128;  // uint64[32]: addresses
  static constexpr int NOTES_SCALES = NOTES_ROWS + 256;   // int32[32]: from there to the scales, where they lie apart
  static constexpr int NOTES_BYTES = NOTES_SCALES + (Record::SCALES_APART ? 128 : 0);
  static constexpr int RAW_OFFSET = NOTES_OFFSET + LOADER_WARPS * NOTES_BYTES;
  static constexpr int TAILS = 4 * 512;
  static constexpr int SLOT_BYTES = TAILS + 4 * Record::TAIL;  // of four keys
  static constexpr int RAW_BYTES = SLOTS * SLOT_BYTES;         // of a warp
  static constexpr int SHARED_BYTES = RAW_OFFSET + LOADER_WARPS * RAW_BYTES;
  static_assert(SHARED_BYTES <= 232448, "a block has 227 KiB");

  // The bits of a stage's keys.
  MLA_DEVICE static uint32_t present(uint32_t shared, int stage) {
    uint32_t bits = 0;
#pragma unroll
    for (int block = 0; block < CLUSTER_; ++block) {
      uint32_t words[4];
      load16(shared + PRESENT_OFFSET + stage * PRESENT_BYTES + block * 16, words);
      bits |= words[0] | words[1] | words[2] | words[3];
    }
    return bits;
  }

  MLA_DEVICE static int rows(const Params& params) { return params.heads; }  // of a query token
  MLA_DEVICE static bool awaited(const Params&) { return false; }
  MLA_DEVICE static int q_box_bytes(const Params& params) { return Base::box_bytes(params.heads); }
};

static_assert(__builtin_offsetof(SparseDecodeTmaParams, cache_1) - __builtin_offsetof(SparseDecodeTmaParams, cache_0) ==
                      sizeof(Pool) &&
                  __builtin_offsetof(SparseDecodeTmaParams, tokens) -
                          __builtin_offsetof(SparseDecodeTmaParams, cache_0) ==
                      MOST_POOLS * sizeof(Pool),
              "selection: Pool mirrors the parameters");

MLA_DEVICE const Pool& pool_at(const SparseDecodeTmaParams& params, int i) {
  return reinterpret_cast<const Pool*>(&params.cache_0)[i];
}

}  // namespace mla::sm90
