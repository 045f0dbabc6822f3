// Decode with keys as the first operand of wgmma: S^T = K Q^T and O^T = V^T P^T, for caches of e4m3 rows of 576 values.
// The first operand may lie in registers, so a warp converts keys where they are multiplied and nothing is written back
// to shared memory. A block has at most ROWS query rows, which are the columns of both products.
#pragma once

#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/decode/traits.hpp"

namespace mla::sm_90 {

// The queries' type decides what a problem converts.
template <class Query>
struct SwapAbProblem : DecodeProblem<Query, 576> {
  using QueryElement = Query;
};

template <int ROWS_>
struct SwapAbPolicy {
  static constexpr int ROWS = ROWS_;
  static_assert(ROWS == 16 || ROWS == 32, "more rows are faster as the first operand (PERF.md)");
  static constexpr int CONSUMERS = 256;  // threads of the two warpgroups that multiply
  static constexpr int THREADS = 128 + CONSUMERS;
  static constexpr int BLOCK_KEYS = 128;  // keys of one step, 64 for each warpgroup's S^T
  static constexpr int STAGES = ROWS == 32 ? 9 : 11;
  // Registers per thread of the producer and of the other two warpgroups. A block is launched with 168 for each thread
  // of its three warpgroups.
  static constexpr int PRODUCER_REGISTERS = 56;
  static constexpr int CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
};

template <class Problem_, class Policy>
struct SwapAbTraits : Policy {
  using Problem = Problem_;
  using Params = typename Problem::Params;
  using OutElement = typename Problem::OutElement;
  using QueryElement = typename Problem::QueryElement;
  using Cluster = ClusterNone;
  using Policy::ROWS, Policy::STAGES, Policy::BLOCK_KEYS, Policy::CONSUMERS;
  static constexpr KvLoad LOAD = KvLoad::fp8;
  static constexpr bool SELECTED = false;
  static constexpr int PRODUCER_GROUPS = 1;
  static constexpr bool HAS_KV_DESCALE = true;
  static constexpr bool STREAMABLE = false;
  static constexpr bool FOLDS = false;
  static constexpr int HEAD_DIM_QK = Problem::HEAD_DIM_QK;
  static constexpr bool WHOLE_BLOCKS = true;
  static constexpr int COLUMN_BLOCKS = HEAD_DIM_QK / 64;
  static constexpr int BOX_BLOCKS = COLUMN_BLOCKS;
  static constexpr int SPLIT_ALIGNMENT = BLOCK_N;
  static constexpr int TILE_STAGES = 4;
  static constexpr int PREFETCHED_STAGES = 4;  // to L2, while the previous kernel runs
  static constexpr int FULL_ARRIVALS = 1;           // the producer's warp whose turn it is
  static constexpr int EMPTY_ARRIVALS = CONSUMERS;  // both warpgroups read a stage
  static constexpr int STEP_STAGES = BLOCK_KEYS / BLOCK_N;

  // A stage has 32 keys as they are stored, in two groups of 16. The second begins 32 bytes further in the turn of the
  // banks, so that lanes which read four keys of both groups read all banks.
  static constexpr int GROUP_BYTES = 16 * HEAD_DIM_QK + 32;
  static constexpr int STAGE_BYTES = 2 * GROUP_BYTES;
  // Queries come through the ring, too, 16 rows a stage.
  static constexpr int Q_STAGES = ROWS / 16;
  static constexpr int Q_ROW_BYTES = Problem::CONVERTS_Q ? HEAD_DIM_QK : 2 * HEAD_DIM_QK;
  static_assert(16 * Q_ROW_BYTES <= STAGE_BYTES, "16 rows of queries fit in a stage");

  static constexpr int Q_BLOCK_BYTES = ROWS * 128;                  // 64 columns of all rows, in the 128-byte swizzle
  static constexpr int P_STEP_BYTES = ROWS * 32;                    // 16 keys of P
  static constexpr int P_BYTES = BLOCK_KEYS / 16 * P_STEP_BYTES;
  static constexpr int P_STAGES = 2;

  MLA_DEVICE static bool combine_streams(const Params&) { return false; }
};

}  // namespace mla::sm_90
