// What a decode block of sm_90 looks like: roles, registers, tile sizes and the picture of shared memory.
#pragma once

#include "common/params/decode_tma.hpp"
#include "sm_90/wgmma.hpp"

namespace mla::sm90 {

// Four warpgroups: one brings keys, one makes scores and probabilities, two hold the 64 x 512 result, 256 columns each.
// 64 rows x 512 columns of fp32 are half of an SM's registers, which is why a block has 64 rows and not 128.
constexpr int ROWS = 64;
constexpr int THREADS = 512;
constexpr int VALUE_COLUMNS = 256;
constexpr int D_V = 512;

// This block's first row within a sequence: the grid is [workers][row tiles].
MLA_DEVICE int first_row() { return blockIdx.x * ROWS; }

// Named barriers, beside the block's own, which is 0: of the scores' threads, of the two warps that ask for boxes, of
// the values' threads, and, two of them, of either of their warpgroups.
constexpr int SCORES_BARRIER = 1;
constexpr int LOADER_BARRIER = 2;
constexpr int VALUES_BARRIER = 3;
constexpr int GROUP_BARRIER = 4;
constexpr int FILL_BARRIER = 6;  // of the warp that asks for keys and the one that then fills partials (promise.hpp)

// How keys come: by 16-byte copies from pages of any size, by the copy engine from pages that are multiples of a box,
// or chosen one by one (sparse_policy.hpp).
enum class Source { gather, tma, selected };

// What one values warpgroup sends to the other block, 64 rows x 256 columns of fp32, comes in so many chunks of
// columns.
constexpr int SENT_CHUNKS = 4;
constexpr int SENT_BYTES = ROWS * VALUE_COLUMNS * 4;
constexpr int GIVEN_CHUNKS = 4;  // likewise, of what goes from one values warpgroup to the other
constexpr int CHUNK_BYTES = SENT_BYTES / SENT_CHUNKS / 4;  // of a warp's rows

// What two blocks of a cluster send each other: nothing, as there is no cluster; keys (SparsePolicy); or, of two cuts
// of a sequence, results to merge (together.hpp), or probabilities, so that each has half of the columns of both
// (sides.hpp).
enum class Exchange { none, keys, results, probabilities };

template <class T, int DEPTH_, Source SOURCE_, Exchange EXCHANGE_ = Exchange::none,
          int STAGES_ = EXCHANGE_ == Exchange::probabilities ? 4 : 5>
struct DecodePolicy {
  using Type = T;
  using Params = DecodeTmaParams;
  static constexpr int DEPTH = DEPTH_;
  static constexpr Source SOURCE = SOURCE_;
  static constexpr Exchange EXCHANGE = EXCHANGE_;
  static constexpr bool PAIRED = EXCHANGE == Exchange::keys;
  static constexpr bool TOGETHER = EXCHANGE == Exchange::results;
  static constexpr bool SIDES = EXCHANGE == Exchange::probabilities;
  static constexpr bool TWO_CUTS = TOGETHER || SIDES;
  static constexpr int BLOCK_COLUMNS = SIDES ? D_V / 2 : D_V;       // of the results, that the block has
  static constexpr int STORED_COLUMNS = BLOCK_COLUMNS / 2;          // of these, that a values warpgroup stores
  static constexpr int KEYS = 32;                                   // keys of a stage, and of one Q K^T and one P V
  static constexpr int GRANULE = SOURCE == Source::tma ? KEYS : 1;  // a plan's cuts are moved down to multiples of it
  // A stage in swizzled blocks of 64 columns: [COLUMN_BLOCKS][KEYS][128 B]; or, so that eight keys lie in one piece,
  // [KEYS / 8][COLUMN_BLOCKS][8][128 B].
  static constexpr int COLUMN_BLOCKS = DEPTH / 64;
  static constexpr int STAGE_BYTES = COLUMN_BLOCKS * KEYS * 128;
  static constexpr int BLOCK_BYTES = PAIRED ? 1024 : KEYS * 128;            // from a column block to the next
  static constexpr int GROUP_BYTES = PAIRED ? COLUMN_BLOCKS * 1024 : 1024;  // from eight keys to the next
  static constexpr int STAGES = STAGES_;
  // Of the other block's keys only those columns come that this block has of the results.
  static constexpr int PEER_STAGES = SIDES ? 2 : 0;
  static constexpr int PEER_STAGE_BYTES = VALUE_COLUMNS / 64 * BLOCK_BYTES;
  static constexpr int BOX_BLOCKS = SIDES ? 1 : COLUMN_BLOCKS;  // column blocks that the copy engine brings at a time
  // Registers per thread. A block begins with 128 each; together they may not take more than that, or they wait for
  // ever. One thread that asks the copy engine needs fewer than 128 that copy, and those fewer than 128 that also
  // dequantise.
  static constexpr int LOADER_REGISTERS = SOURCE == Source::tma ? 32 : SOURCE == Source::gather ? 48 : 56;
  static constexpr int SCORES_REGISTERS = SOURCE == Source::tma ? 160 : SOURCE == Source::gather ? 144 : 136;
  static constexpr int VALUES_REGISTERS = 160;
  static constexpr int FULL_ARRIVALS = SOURCE == Source::tma ? 1 : 128;  // on a stage: one asks TMA, or all copy
  static constexpr int Q_STEPS = DEPTH / 16;                             // 16-deep steps of Q K^T
  // Q operands read from registers, not shared memory: what keeps shared-memory reads under the matrix time.
  static constexpr int Q_REGISTER_STEPS = SOURCE == Source::tma ? 28 : SOURCE == Source::gather ? 24 : 22;
  static constexpr int Q_SHARED_STEPS = Q_STEPS - Q_REGISTER_STEPS;
  // Of a Q K^T, at which the P before it is handed over: where keys are what is waited for, earlier.
  static constexpr int HAND_OVER_STEP = SOURCE == Source::selected ? 16 : Q_STEPS - 8;
  // An item's queries come through two stages of the ring, half of every row in each, under the 64-byte swizzle:
  static constexpr int Q_BOXES = DEPTH / 64;     // [Q_BOXES][rows][64 B], with the rows of `q_box_bytes`
  static constexpr int Q_BOX_BYTES = ROWS * 64;  // where Q K^T reads them, and the most a box can have
  static_assert(Q_BOXES * Q_BOX_BYTES == STAGE_BYTES, "half of the queries fill a stage");
  static_assert(Q_BOX_BYTES % 512 == 0 && STAGE_BYTES % 512 == 0, "the 64-byte swizzle repeats every 512 bytes");

  static constexpr int KV_OFFSET = 0;
  static constexpr int PEER_OFFSET = KV_OFFSET + STAGES * STAGE_BYTES;
  static constexpr int Q_OFFSET = PEER_OFFSET + PEER_STAGES * PEER_STAGE_BYTES;
  // What the scores hand to the values, in two slots, so that a P V can queue behind the last one. Within a slot:
  static constexpr int P_OFFSET = Q_OFFSET + Q_SHARED_STEPS * 2048;  // P, [KEYS / 16][64 rows x 16 keys]
  static constexpr int P_BYTES = ROWS * KEYS * 2;
  static constexpr int FACTOR = P_BYTES;        // float[64]: rescale of the rows before this P, if ordered
  static constexpr int INVERSE = FACTOR + 256;  // float[64]: 1 / denominator, that finish an item
  static constexpr int LSE = INVERSE + 256;     // float[64]: lse without the sink, likewise
  static constexpr int ORDER = LSE + 256;       // int32[4]: an Order for each warp's rows
  static constexpr int ITEM = ORDER + 16;       // int32[2]: sequence and partial row, with an item's last P
  static constexpr int KEYS_LEFT = ITEM + 8;    // int32: of its stage, likewise
  static constexpr int P_SLOT_BYTES = ITEM + 112;
  static constexpr int P_SLOTS = 2;
  static constexpr int ALL_P_SLOTS = SIDES ? 2 * P_SLOTS : P_SLOTS;  // those of the other block's P behind this one's
  static constexpr int ITEM_OFFSET =
      P_OFFSET + ALL_P_SLOTS * P_SLOT_BYTES;  // Item[ITEMS], from the loader to the scores
  static constexpr int ITEMS = 4;
  static constexpr int BARRIER_OFFSET = ITEM_OFFSET + ITEMS * 32;  // uint64: see Barriers
  // Then what only blocks of one kind have. Those that merge: references and sums of the peer's cut, float[2][64], what
  // the results of both cuts are multiplied by, likewise, and the lse of both; and more barriers.
  static constexpr int REST = BARRIER_OFFSET + 8 * (2 * STAGES + ALL_P_SLOTS + P_SLOTS + 2 * ITEMS);
  static constexpr int PEER_ROWS = REST;
  static constexpr int WEIGHTS = PEER_ROWS + 2 * ROWS * 4;
  static constexpr int BOTH_LSE = WEIGHTS + 2 * ROWS * 4;
  static constexpr int PEER_BARRIERS = BOTH_LSE + ROWS * 4;
  // Those whose words combine may wait for: a barrier, and what the words are before they have come.
  static constexpr bool AWAITABLE = SOURCE == Source::tma && !TOGETHER;  // else the loader has no idle warp
  static constexpr int FILLED = SIDES ? PEER_BARRIERS + 8 * (2 + P_SLOTS + 2 * PEER_STAGES + 2 * GIVEN_CHUNKS) : REST;
  static constexpr int PATTERN = (FILLED + 8 + 15) / 16 * 16;
  static constexpr int PATTERN_BYTES = SIDES ? BLOCK_COLUMNS * 4 : 4096;
  static constexpr int SHARED_BYTES = TOGETHER    ? PEER_BARRIERS + 8 * (4 + 4 * SENT_CHUNKS)
                                      : AWAITABLE ? PATTERN + PATTERN_BYTES
                                                  : REST;
  static_assert(SHARED_BYTES <= 232448, "a block has 227 KiB");
  static_assert(BLOCK_BYTES % 1024 == 0, "the 128-byte swizzle repeats every 1024 bytes");
  static_assert(KEYS % 16 == 0, "P V is 16 keys deep");

  MLA_DEVICE static int rows(const Params& params) { return params.rows; }  // of a sequence
  // Whether combine waits for the words of the block's one partial (awaited.hpp).
  MLA_DEVICE static bool awaited(const Params& params) { return params.awaited != 0; }
  MLA_DEVICE static int q_box_bytes(const Params& params) { return box_bytes(params.rows); }
  // The host makes boxes of no more rows than there are, in whole turns of the swizzle.
  MLA_DEVICE static int box_bytes(int rows) { return min(ROWS, (rows + 7) / 8 * 8) * 64; }
};

// Addresses of the barriers, by role.
template <class Policy>
struct Barriers {
  uint32_t base;
  MLA_DEVICE explicit Barriers(uint32_t shared) : base(shared + Policy::BARRIER_OFFSET) {}
  MLA_DEVICE uint32_t kv_full(int stage) const { return base + 8 * stage; }
  MLA_DEVICE uint32_t kv_empty(int stage) const { return base + 8 * (Policy::STAGES + stage); }
  MLA_DEVICE uint32_t p_full(int slot) const { return base + 8 * (2 * Policy::STAGES + slot); }
  MLA_DEVICE uint32_t p_empty(int slot) const { return p_full(Policy::ALL_P_SLOTS + slot); }
  MLA_DEVICE uint32_t item_full(int slot) const { return p_empty(Policy::P_SLOTS + slot); }
  MLA_DEVICE uint32_t item_empty(int slot) const { return item_full(Policy::ITEMS + slot); }
  // Where combine waits for words: that they are NOT_YET.
  MLA_DEVICE uint32_t filled() const { return base - Policy::BARRIER_OFFSET + Policy::FILLED; }
  // Of two cuts: what the peer sends of its rows, and what both cuts count.
  MLA_DEVICE uint32_t rows_sent() const { return base - Policy::BARRIER_OFFSET + Policy::PEER_BARRIERS; }
  MLA_DEVICE uint32_t weighed() const { return rows_sent() + 8; }
  // Where results are sent: that the peer is done with its ring; that it has all that this block sends; what it sends
  // of a warp's rows of a chunk.
  MLA_DEVICE uint32_t ring_left() const { return rows_sent() + 16; }
  MLA_DEVICE uint32_t taken() const { return rows_sent() + 24; }
  MLA_DEVICE uint32_t sent(int warp, int chunk) const { return rows_sent() + 32 + 8 * (chunk * 4 + warp); }
  // Where each block has one side: that a P can be sent; the ring of the other block's keys;
  MLA_DEVICE uint32_t p_written(int slot) const { return rows_sent() + 16 + 8 * slot; }
  MLA_DEVICE uint32_t peer_full(int stage) const { return p_written(Policy::P_SLOTS + stage); }
  MLA_DEVICE uint32_t peer_empty(int stage) const { return peer_full(Policy::PEER_STAGES + stage); }
  // and what one values warpgroup gives the other of a chunk of columns.
  MLA_DEVICE uint32_t given(int group, int chunk) const {
    return peer_empty(Policy::PEER_STAGES + group * GIVEN_CHUNKS + chunk);
  }
};

// What a values warp is to do with a slot: RESCALE, then MULTIPLY; LAST marks the item's last product; FINISH the item
// with the slot's reciprocals; QUERIES goes with FINISH: two stages of queries passed that nothing is multiplied with.
enum Order : int { MULTIPLY = 1, RESCALE = 2, LAST = 4, FINISH = 8, QUERIES = 16, STOP = 32 };

// Where a lane stores or loads its row of the four 8 x 8 matrices of its warp's 16 rows of P, from where 16 keys begin.
MLA_DEVICE uint32_t p_fragment(int thread) {
  const int matrix = thread % 32 / 8;
  return (thread / 32 * 2 + matrix % 2) * 256 + matrix / 2 * 128 + thread % 8 * 16;
}

// Zeros the first `COLUMNS` values of a stage's keys from the `used`-th on; by a warpgroup.
template <class Policy, int COLUMNS>
MLA_DEVICE void clear_keys(uint32_t stage, int used) {
  constexpr int PIECES = COLUMNS / 8;  // of 16 bytes
  for (int i = used * PIECES + group_thread(); i < Policy::KEYS * PIECES; i += 128) {
    const uint32_t to = stage + i % PIECES / 8 * Policy::BLOCK_BYTES + i / PIECES * 128 + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  fence_async();
}

// Position in a ring of STAGES: the stage, and the parity of the barrier phase that it is in.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  MLA_DEVICE void next(int stages = STAGES) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace mla::sm90
