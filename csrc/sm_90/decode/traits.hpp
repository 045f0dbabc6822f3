// The shape of a decode block on sm_90: the problem, the policy, and the sizes that follow from both.
#pragma once

#include "common/division.hpp"
#include "common/params/decode_tma.hpp"
#include "sm_90/decode/pipeline.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/wgmma.hpp"

namespace mla::sm_90 {

// Four warpgroups: the producer brings keys, one computes S = Q K^T and the softmax, two hold the output, half of its
// columns each. 64 rows x 512 columns of fp32 are half of an SM's registers, which is why a block has 64 rows, not 128.
constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 32;  // keys of a stage, and of one Q K^T and one P V
constexpr int THREADS = 512;
constexpr int WIDEST_HEAD_DIM_V = 512;  // of the cluster modes that merge O, which have no instances of another
constexpr int SHARED_MEMORY_LIMIT = 232448;  // bytes per block: 227 KiB

// This block's first row within a sequence. The grid is [sm parts][row tiles]. The last rows come first, since those of an
// extend see the most keys.
MLA_DEVICE int first_row() { return (gridDim.x - 1 - blockIdx.x) * BLOCK_M; }

// How keys reach shared memory: cp.async of 16 bytes from pages of any size; TMA from pages that are multiples of a
// box; selected one by one, and dequantised (sparse_decode/producer_dequant.hpp) or gathered as they are stored
// (sparse_decode/producer_gather.hpp); or as e4m3 rows, by bulk copies from pages of any size, which the producer
// converts (fp8); or as e4m3 rows by TMA, of which Q K^T multiplies what is stored and the producer converts the values
// alone (fp8_scores).
enum class KvLoad { cp_async, tma, dequant, gather, fp8, fp8_scores };

// The types by that of the queries. Element is what the tensor cores multiply, unless a policy scales queries; keys of
// any type are converted to it. e4m3 is exact in both, and fp16 takes a quarter of the instructions.
template <class Query>
struct QueryTypes {
  using Element = Query;
  using OutElement = Query;
  static constexpr bool CONVERTS_Q = false;  // the producer converts queries, too
};
template <>
struct QueryTypes<fp8> {
  using Element = fp16;
  using OutElement = bf16;
  static constexpr bool CONVERTS_Q = true;
};

// The problem that a block computes. A row is (query token, head); its sequence has `rows` of them. With ROTATES the
// cached rope part is un-rotated, and it is rotated by its position as it is loaded (rotate_rope.hpp).
template <class Query, int HEAD_DIM_QK_, bool ROTATES_ = false, int HEAD_DIM_V_ = 512>
struct DecodeProblem {
  using Element = typename QueryTypes<Query>::Element;
  using OutElement = typename QueryTypes<Query>::OutElement;
  static constexpr bool CONVERTS_Q = QueryTypes<Query>::CONVERTS_Q;
  using Params = DecodeTmaParams;
  static constexpr int HEAD_DIM_QK = HEAD_DIM_QK_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr bool ROTATES = ROTATES_;
  static_assert(!ROTATES || HEAD_DIM_QK == 576, "only a row of 576 values has a rope part of its own");

  MLA_DEVICE static int rows(const Params& params) { return params.rows; }
  // The sequence of an even split, of which each sequence has num_splits.
  MLA_DEVICE static int sequence_of_split(const Params& params, int split) {
    return divided(split, params.splits_reciprocal, params.splits_shift);
  }
  // Whether combine runs beside this kernel and reads the block's one partial word by word (combine/sentinel.hpp).
  MLA_DEVICE static bool combine_streams(const Params& params) { return params.streaming != 0; }
};

// How it is computed: where keys come from, what a cluster of two CTAs shares, and how resources are divided.
template <KvLoad LOAD_, class Cluster_, int STAGES_ = Cluster_::STAGES, bool ROTATES = false, int RAW_STAGES_ = 2,
          bool SCALES_Q_ = false, bool FOLDS_ = false>
struct DecodePolicy {
  using Cluster = Cluster_;
  static constexpr KvLoad LOAD = LOAD_;
  static constexpr int STAGES = STAGES_;
  static constexpr int RAW_STAGES = RAW_STAGES_;  // of e4m3 rows as they are stored
  static constexpr bool FOLDS = FOLDS_;        // work tiles are nodes of splits (fold.hpp)
  static constexpr bool SCALES_Q = SCALES_Q_;  // bf16 queries of e4m3 keys become fp16 (scaled_queries.hpp)
  // Registers per thread (setmaxnreg). A block is launched with 128 for each thread; the sum over the four warpgroups
  // may not exceed 512, or the increase waits forever. One thread that issues TMA, or threads that copy from addresses
  // that others looked up, need fewer than 128 threads that find addresses, and those fewer than 128 that also
  // dequantise. Threads that rotate what TMA or others bring are in between. Threads that gather get along with 32, which
  // leaves QK registers for most of the queries, but in clusters that merge; of narrow rows QK has registers to spare.
  static constexpr bool MERGES_GATHERED = LOAD == KvLoad::gather && Cluster::MERGES_SPLITS;
  static constexpr int PRODUCER_REGISTERS = ROTATES                        ? 40
                                            : LOAD == KvLoad::tma      ? 32
                                            : LOAD == KvLoad::gather ? (MERGES_GATHERED || STAGES > Cluster::STAGES ? 40 : 32)
                                            : LOAD == KvLoad::cp_async ? 48
                                            : LOAD == KvLoad::dequant ? 56
                                                                           : 64;
  static constexpr int PV_REGISTERS = 160;  // 128 of O, and what addresses and the epilogue need
  static constexpr int QK_REGISTERS = 512 - 2 * PV_REGISTERS - PRODUCER_REGISTERS;  // the rest
  // Steps of Q K^T whose Q operand lies in registers. They keep shared-memory reads below the time of the products.
  static constexpr int Q_REGISTER_STEPS = ROTATES                        ? 26
                                          : LOAD == KvLoad::tma      ? 28
                                          : LOAD == KvLoad::gather ? (MERGES_GATHERED ? 26 : 28)
                                          : LOAD == KvLoad::cp_async ? 24
                                          : LOAD == KvLoad::dequant ? 22
                                                                         : 20;
};

// There is room for four stages of 576 values beside what is copied of e4m3 rows, for four of un-rotated rows, which
// hold what rotates them, too, and for four beside SHARED_TILES of a node's sum. Of narrow rows more stages keep as many
// bytes on their way: nine of five column blocks, 15 of three, or eight raw ones.
template <KvLoad LOAD, class Cluster, int HEAD_DIM_QK, bool ROTATES, bool FOLDS>
MLA_DEVICE constexpr int decode_stages() {
  if (ROTATES || FOLDS || LOAD == KvLoad::fp8_scores || (LOAD == KvLoad::fp8 && HEAD_DIM_QK == 576)) return 4;
  if (LOAD == KvLoad::fp8 || HEAD_DIM_QK >= 512) return Cluster::STAGES;
  return HEAD_DIM_QK > 192 ? 9 : 15;
}

// Stages of e4m3 rows as they are stored. Where Q K^T reads them, too, a stage is copied RAW_LAG stages after it was
// converted, when its scores are known.
template <KvLoad LOAD, int HEAD_DIM_QK>
MLA_DEVICE constexpr int raw_stages() {
  if (LOAD == KvLoad::fp8_scores) return 4;
  return HEAD_DIM_QK >= 512 ? 2 : 8;
}

// The policy of dense decode.
template <KvLoad LOAD, class Cluster, int HEAD_DIM_QK, bool ROTATES = false, bool SCALES_Q = false,
          bool FOLDS = false>
using DecodePolicyOf = DecodePolicy<LOAD, Cluster, decode_stages<LOAD, Cluster, HEAD_DIM_QK, ROTATES, FOLDS>(), ROTATES,
                                    raw_stages<LOAD, HEAD_DIM_QK>(), SCALES_Q, FOLDS>;

// The type that the tensor cores multiply.
template <bool SCALES_Q, class Element>
struct Multiplied {
  using Type = Element;
};
template <class Element>
struct Multiplied<true, Element> {
  using Type = fp16;
};

MLA_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }

template <class Problem_, class Policy_>
struct DecodeTraits {
  using Problem = Problem_;
  using Policy = Policy_;
  static constexpr bool SCALES_Q = Policy::SCALES_Q;
  static constexpr bool FOLDS = Policy::FOLDS;
  using Element = typename Multiplied<SCALES_Q, typename Problem::Element>::Type;
  using OutElement = typename Problem::OutElement;
  using Params = typename Problem::Params;
  using Cluster = typename Policy::Cluster;
  static constexpr int HEAD_DIM_QK = Problem::HEAD_DIM_QK;
  static constexpr int HEAD_DIM_V = Problem::HEAD_DIM_V;
  static constexpr int WARPGROUP_COLUMNS = HEAD_DIM_V / 2;  // of O, that a PV warpgroup holds
  static constexpr KvLoad LOAD = Policy::LOAD;
  static constexpr int STAGES = Policy::STAGES;
  static constexpr bool CONVERTS_Q = Problem::CONVERTS_Q;
  // Whether Q K^T multiplies queries and keys as they are stored, in steps of 32 values, not 16.
  static constexpr bool SCORES_AS_STORED = LOAD == KvLoad::fp8_scores;
  static constexpr bool CONVERTS_KEYS = LOAD == KvLoad::fp8 || SCORES_AS_STORED;
  static constexpr bool HAS_KV_DESCALE = CONVERTS_KEYS;  // scores and results take kv_descale
  static constexpr bool ROTATES = Problem::ROTATES;
  static_assert(!ROTATES || LOAD == KvLoad::tma || LOAD == KvLoad::cp_async, "keys of 16 bits are rotated");

  // A KV stage in swizzled blocks of 64 columns: [COLUMN_BLOCKS][BLOCK_N][128 B]; or, where a CTA sends eight keys to its
  // peer in one piece, [BLOCK_N / 8][COLUMN_BLOCKS][8][128 B]. Of rows that end within a block, no step reads the rest of it.
  static constexpr bool WHOLE_BLOCKS = HEAD_DIM_QK % 64 == 0;
  static constexpr int COLUMN_BLOCKS = ((SCORES_AS_STORED ? HEAD_DIM_V : HEAD_DIM_QK) + 63) / 64;
  static constexpr int KEY_BYTES = COLUMN_BLOCKS * BLOCK_N * 128;
  // With ROTATES the rows of rope_cos_sin at the keys' positions follow them, [BLOCK_N][COS_SIN_BYTES].
  static constexpr int ROPE_AT = KEY_BYTES - BLOCK_N * 128;  // the last column block
  static constexpr int COS_SIN_AT = KEY_BYTES;
  static constexpr int COS_SIN_BYTES = 64 * 4;  // 32 cosines, then 32 sines
  static constexpr int STAGE_BYTES = ROTATES ? COS_SIN_AT + BLOCK_N * COS_SIN_BYTES : KEY_BYTES;
  static constexpr bool SENDS_KEYS = Cluster::SHARES_KV && LOAD != KvLoad::tma;
  static constexpr int BLOCK_BYTES = SENDS_KEYS ? 1024 : BLOCK_N * 128;          // from a column block to the next
  static constexpr int GROUP_BYTES = SENDS_KEYS ? COLUMN_BLOCKS * 1024 : 1024;  // from 8 keys to the next 8
  // Ring of the peer's keys: only the columns of the output that this CTA has.
  static constexpr int PEER_STAGES = Cluster::PEER_STAGES;
  static constexpr int PEER_STAGE_BYTES = WARPGROUP_COLUMNS / 64 * BLOCK_BYTES;
  // Column blocks that one TMA load brings. Rows that end within a block come by the block, the rest of which TMA fills.
  // Of two CTAs that share keys one loads so many, and the other the rest by a map of its own.
  static constexpr int BOX_BLOCKS = Cluster::EXCHANGES_P || ROTATES || !WHOLE_BLOCKS ? 1
                                    : Cluster::SHARES_KV ? (COLUMN_BLOCKS + 1) / 2
                                                         : COLUMN_BLOCKS;
  // A plan's split points are rounded down to multiples of this number of keys.
  static constexpr int SPLIT_ALIGNMENT = LOAD == KvLoad::tma || CONVERTS_KEYS ? BLOCK_N : 1;
  // With ROTATES 64 threads of the producer rotate what the others bring: one issues TMA, or COPIERS copy.
  static constexpr int ROTATORS = ROTATES ? 64 : 0;
  static constexpr int COPIERS = 128 - ROTATORS;
  static constexpr int FULL_ARRIVALS = LOAD == KvLoad::tma ? 1 + ROTATORS : 128;
  static constexpr int ROPE_FULL_ARRIVALS = LOAD == KvLoad::tma ? 1 : COPIERS;

  // Output columns of this block, and those of them that one PV warpgroup stores.
  static constexpr int BLOCK_COLUMNS = Cluster::EXCHANGES_P ? HEAD_DIM_V / 2 : HEAD_DIM_V;
  static constexpr int STORED_COLUMNS = Cluster::REDUCES_FOUR ? HEAD_DIM_V / 4 : BLOCK_COLUMNS / 2;

  static constexpr int Q_STEPS = HEAD_DIM_QK / (SCORES_AS_STORED ? 32 : 16);  // steps of Q K^T, of 32 bytes of a row
  static constexpr int Q_REGISTER_STEPS =
      SCORES_AS_STORED ? Q_STEPS : min_of(Policy::Q_REGISTER_STEPS, Q_STEPS - 2);  // narrow rows: all but a box
  static constexpr int Q_SHARED_STEPS = Q_STEPS - Q_REGISTER_STEPS;
  static_assert(Q_SHARED_STEPS % 2 == 0, "a box of queries is two steps deep");
  // Whether keys are selected one by one, and some of a stage may be absent.
  static constexpr bool SELECTED = LOAD == KvLoad::dequant || LOAD == KvLoad::gather;
  static constexpr bool RETURNS_MAX_LOGITS = false;  // the largest score of every row (max_logits.hpp)
  // The step of the next Q K^T after which a P is published. It is earlier for selected keys: a stage that is released
  // earlier has more time to be filled.
  static constexpr int P_COMMIT_STEP = LOAD == KvLoad::dequant   ? 16
                                       : LOAD == KvLoad::gather ? (Q_STEPS > 20 ? Q_STEPS - 20 : Q_STEPS - 8)
                                       : SCORES_AS_STORED       ? Q_STEPS - 4
                                                                      : Q_STEPS - 8;
  // A tile's queries come through two stages of the KV ring, half of every row in each (of an odd number of boxes, the
  // second half is one shorter), in the 64-byte swizzle:
  // [Q_BOXES][rows][64 B], with the rows that `q_box_bytes` says. Q_BOX_BYTES is the most that a box can have, and its
  // size where Q K^T reads it.
  static constexpr int Q_BOXES = (HEAD_DIM_QK + 63) / 64;
  static constexpr int LAST_Q_BOXES = HEAD_DIM_QK / 32 - Q_BOXES;  // of the second half
  static constexpr int Q_BOX_BYTES = BLOCK_M * 64;
  static_assert(SCORES_AS_STORED || Q_BOXES * Q_BOX_BYTES == KEY_BYTES, "half of the queries take as much as a stage's keys");
  static_assert(Q_BOX_BYTES % 512 == 0 && STAGE_BYTES % 512 == 0, "the 64-byte swizzle repeats every 512 bytes");
  static_assert(BLOCK_BYTES % 1024 == 0, "the 128-byte swizzle repeats every 1024 bytes");
  static_assert(BLOCK_N % 16 == 0, "P V is 16 keys deep");

  static constexpr int P_STAGES = 2;  // so that a P V can queue behind the last one
  static constexpr int ALL_P_STAGES = Cluster::EXCHANGES_P ? 2 * P_STAGES : P_STAGES;  // the peer's P follow the own
  static constexpr int TILE_STAGES = 4;
  static constexpr int PREFETCHED_STAGES = 0;  // of keys that come by bulk copies, before the previous kernel has ended

  // The epilogue's buffers are in the stage that was read last, or, where that is too small, behind all else. Where a CTA
  // has sent its half of that stage to the peer, the copy may still be reading it: they are in the half that has come.
  static constexpr bool OUT_IN_HALF = SENDS_KEYS && !Cluster::MERGES_SPLITS;
  static constexpr int OUT_PIECES = OUT_IN_HALF ? 1 : 2;  // of a PV warp; of two, one is written while another is read
  static constexpr int OUT_BUFFER_BYTES = OUT_PIECES * 16 * 128;
  static_assert(!OUT_IN_HALF || 8 * OUT_BUFFER_BYTES <= STAGE_BYTES / 2);
  static constexpr int OUT_BYTES = 8 * OUT_BUFFER_BYTES <= STAGE_BYTES ? 0 : 8 * OUT_BUFFER_BYTES;

  // For e4m3 rows: a stage's keys are copied as they are stored, RAW_STAGES - RAW_LAG stages ahead of their conversion.
  static constexpr int PRODUCER_WARPS = 4;
  static constexpr int RAW_STAGES = Policy::RAW_STAGES;
  static constexpr int RAW_LAG = SCORES_AS_STORED ? 1 : 0;
  static constexpr int RAW_STAGE_BYTES = BLOCK_N * HEAD_DIM_QK;
  static constexpr int RAW_BLOCK_BYTES = BLOCK_N * 64;  // with SCORES_AS_STORED, 64 values of a stage's keys

  // Whether combine can run beside this kernel; ClusterReduceO and ROTATES leave the producer no idle warp to fill
  // partials, ClusterShareKv is for calls that leave combine no SM, and a streaming combine has no instances of narrower
  // results.
  static constexpr bool STREAMABLE = LOAD == KvLoad::tma && !Cluster::REDUCES_O && !Cluster::SHARES_KV && !ROTATES && !FOLDS &&
                                     HEAD_DIM_V == WIDEST_HEAD_DIM_V;

  MLA_DEVICE static bool combine_streams(const Params& params) { return Problem::combine_streams(params); }
  // The host makes boxes of no more rows than there are, in whole periods of the swizzle.
  MLA_DEVICE static int q_box_bytes(const Params& params) {
    return min(BLOCK_M, (Problem::rows(params) + 7) / 8 * 8) * 64;
  }
};

// Where a lane stores or loads its row of the four 8 x 8 matrices of its warp's 16 rows of P, from where 16 keys begin.
MLA_DEVICE uint32_t p_fragment(int thread) {
  const int matrix = thread % 32 / 8;
  return (thread / 32 * 2 + matrix % 2) * 256 + matrix / 2 * 128 + thread % 8 * 16;
}

}  // namespace mla::sm_90
