// Sparse decode with keys as the first operand of wgmma: S^T = K Q^T and O^T = V^T P^T, for at most ROWS heads. The first
// operand may lie in registers, so a warp dequantises keys where they are multiplied: no dequantised key is stored, and
// 16 query rows do not cost as much as 64.
#pragma once

#include "sm_90/sparse_decode/traits.hpp"

namespace mla::sm_90 {

template <int ROWS_>
struct SparseSwapAbPolicy {
  static constexpr int ROWS = ROWS_;
  static_assert(ROWS == 16 || ROWS == 32, "more rows have the results of one warpgroup in too many registers");
  // The warpgroups that multiply. Each takes steps of its own, and they meet at the end of a work tile: while one waits
  // for a product or a barrier, the others convert. 32 rows leave registers for two.
  static constexpr int GROUPS = ROWS == 16 ? 3 : 2;
  static constexpr int CONSUMERS = GROUPS * 128;
  static constexpr int THREADS = 128 + CONSUMERS;
  static constexpr int STAGES = GROUPS == 3 ? 14 : 12;
  // Registers per thread of the producer and of the others; a block is launched with 128 or 168 for each.
  static constexpr int PRODUCER_REGISTERS = 56;
  static constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 152 : 224;
};

template <class Problem_, class Policy>
struct SparseSwapAbTraits : Policy {
  using Problem = Problem_;
  using KvFormat = typename Problem::KvFormat;
  using Params = typename Problem::Params;
  using OutElement = typename Problem::OutElement;
  using Cluster = ClusterNone;
  using Policy::ROWS, Policy::GROUPS, Policy::STAGES;
  static_assert(KvFormat::LATENT == 512 && !KvFormat::SCALES_APART, "a record is that of v32");
  static constexpr KvLoad LOAD = KvLoad::dequant;
  static constexpr bool SELECTED = true;
  static constexpr bool LEAVES_VALUES = true;  // Q K^T leaves columns of V^T in shared memory
  static constexpr int PRODUCER_GROUPS = 1;
  static constexpr bool STREAMABLE = false;
  static constexpr int HEAD_DIM_QK = Problem::HEAD_DIM_QK;
  static constexpr int COLUMN_BLOCKS = HEAD_DIM_QK / 64;
  static constexpr int TILE_STAGES = 4;

  // A stage has the records of 16 keys, which are one warp's rows of S^T and one step of V^T P^T.
  static constexpr int STAGE_KEYS = 16;
  static constexpr int STEP_STAGES = 4;
  static constexpr int STEP_KEYS = STEP_STAGES * STAGE_KEYS;
  static constexpr int STAGE_BYTES = STAGE_KEYS * KvFormat::TOKEN_BYTES;
  static constexpr int SCALES_AT = KvFormat::LATENT;  // within a record, as is the next
  static constexpr int ROPE_AT = SCALES_AT + 16;
  static constexpr int FULL_ARRIVALS = 33;  // the copies of a warp's lanes, and one lane that says which keys are there
  static constexpr int EMPTY_ARRIVALS = 128;  // the warpgroup that multiplies it

  // A warpgroup's V^T has eight tiles of 64 columns. Of the first of them, Q K^T leaves what it has dequantised in shared
  // memory, [tile][64 columns][64 keys] in the 128-byte swizzle; more would take stages that hide latency.
  static constexpr int TILES = KvFormat::LATENT / 64;
  static constexpr int VT_TILES = 2;
  static constexpr int VT_TILE_BYTES = 64 * STEP_KEYS * 2;
  static constexpr int VT_BYTES = VT_TILES * VT_TILE_BYTES;

  static constexpr int Q_BLOCK_BYTES = ROWS * 128;  // 64 columns of all rows, in the 128-byte swizzle
  static constexpr int Q_BOXES = COLUMN_BLOCKS;     // of each half of the queries, as TMA brings them
  static constexpr int P_STEP_BYTES = ROWS * 32;    // 16 keys of P
  static constexpr int P_BYTES = STEP_STAGES * P_STEP_BYTES;
  static constexpr int P_STAGES = 2;

  // The host makes boxes of no more rows than there are, in whole turns of the swizzle.
  MLA_DEVICE static int q_box_bytes(const Params& params) { return (params.heads + 7) / 8 * 8 * 64; }
};

}  // namespace mla::sm_90
