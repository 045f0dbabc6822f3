// Sparse decode for at most 16 heads, with keys as the first operand of wgmma: S^T = K Q^T and O^T = V^T P^T, both read
// from keys that the producer has dequantised in shared memory. One warpgroup multiplies, for 16 query rows take a
// quarter of the products of 64; the others dequantise.
#pragma once

#include "sm_90/sparse_decode/traits.hpp"

namespace mla::sm_90 {

template <class KvFormat>
struct FewHeadsPolicy {
  static constexpr int ROWS = 16;
  static constexpr int PRODUCER_GROUPS = 2;
  static constexpr int PRODUCER_WARPS = 4 * PRODUCER_GROUPS;
  static constexpr int CONSUMERS = 128;
  static constexpr int THREADS = 32 * PRODUCER_WARPS + CONSUMERS;
  static constexpr int STAGES = 2;
  // As many as there is room for beside the keys.
  static constexpr int RAW_STAGES = KvFormat::HEAD_DIM_QK > 512 ? 2 : KvFormat::TAIL > 16 ? 3 : 4;
  // Registers per thread; a block is launched with 168 for each.
  static constexpr int PRODUCER_REGISTERS = 160;
  static constexpr int CONSUMER_REGISTERS = 184;
};

template <class Problem_, class Policy>
struct FewHeadsTraits : Policy {
  using Problem = Problem_;
  using KvFormat = typename Problem::KvFormat;
  using Params = typename Problem::Params;
  using OutElement = typename Problem::OutElement;
  using Cluster = ClusterNone;
  using Policy::ROWS, Policy::PRODUCER_WARPS, Policy::RAW_STAGES, Policy::STAGES;
  static constexpr KvLoad LOAD = KvLoad::dequant;
  static constexpr bool SELECTED = true;
  static constexpr bool LEAVES_VALUES = false;
  static constexpr bool STREAMABLE = false;
  static constexpr bool HAS_KV_DESCALE = false;
  static_assert(KvFormat::HAS_SCALES, "scores and results take no descale");
  static constexpr int HEAD_DIM_QK = Problem::HEAD_DIM_QK;
  static constexpr int COLUMN_BLOCKS = HEAD_DIM_QK / 64;
  static constexpr int TILE_STAGES = 4;
  static constexpr int FULL_ARRIVALS = PRODUCER_WARPS;
  static constexpr int EMPTY_ARRIVALS = Policy::CONSUMERS;

  // A stage has the 64 keys of one product, in blocks of 64 columns in the 128-byte swizzle, as a decode block's.
  static constexpr int STAGE_KEYS = 64;
  static constexpr int OWN_KEYS = STAGE_KEYS / PRODUCER_WARPS;
  static constexpr int BLOCK_BYTES = STAGE_KEYS * 128;
  static constexpr int GROUP_BYTES = 1024;
  static constexpr int STAGE_BYTES = COLUMN_BLOCKS * BLOCK_BYTES;

  // Queries lie as TMA brings them: boxes of 32 columns, in the 64-byte swizzle.
  static constexpr bool Q_APART = true;
  static constexpr int Q_BOXES = COLUMN_BLOCKS;  // of each half of the queries
  static constexpr int Q_BYTES = 2 * Q_BOXES * ROWS * 64;
  static constexpr int P_STEP_BYTES = ROWS * 32;  // 16 keys of P
  static constexpr int P_BYTES = STAGE_KEYS / 16 * P_STEP_BYTES;
  static constexpr int P_STAGES = 2;  // while a warp stores the next P, others may multiply the one before
  static constexpr int TILES = Problem::HEAD_DIM_V / 64;  // of O^T, 64 columns each
  // Results on their way to memory, fp32 [ROWS][OUT_ROW_BYTES] in the stage that was read last; rows begin four banks
  // further on than the one before.
  static constexpr int OUT_ROW_BYTES = Problem::HEAD_DIM_V * 4 + 16;
  static_assert(ROWS * OUT_ROW_BYTES <= STAGE_BYTES, "a stage has room for the results");

  static constexpr bool HAS_ROPE = KvFormat::LATENT < KvFormat::HEAD_DIM_QK;
  static constexpr int TAILS = 4 * 512;
  static constexpr int RAW_STAGE_BYTES = TAILS + 4 * KvFormat::TAIL;
  static constexpr int RAW_BYTES = RAW_STAGES * RAW_STAGE_BYTES;
  using Scratch = ProducerScratch<KvFormat::SCALES_APART>;
  static constexpr int SCRATCH_PRESENT = __builtin_offsetof(Scratch, present);
  static constexpr int SCRATCH_INDICES = __builtin_offsetof(Scratch, indices);
  static constexpr int SCRATCH_ROWS = __builtin_offsetof(Scratch, rows);
  static constexpr int SCRATCH_SCALES = __builtin_offsetof(Scratch, to_scales);
  static constexpr int SCRATCH_BYTES = SCRATCH_SCALES + (KvFormat::SCALES_APART ? 128 : 0);
  static constexpr int PRESENT_BYTES = PRODUCER_WARPS * 4;  // of a stage: a word of each warp, a bit for each of its keys

  // Where the producer's memory lies within the block's (shared_storage.hpp).
  static constexpr int RAW = STAGES * STAGE_BYTES + Q_BYTES + P_STAGES * P_BYTES;
  static constexpr int SCRATCH = RAW + PRODUCER_WARPS * RAW_BYTES;
  static constexpr int PRESENT = SCRATCH + PRODUCER_WARPS * SCRATCH_BYTES;

  // The host makes boxes of no more rows than there are, in whole turns of the swizzle.
  MLA_DEVICE static int q_box_bytes(const Params& params) { return (params.heads + 7) / 8 * 8 * 64; }
};

}  // namespace mla::sm_90
