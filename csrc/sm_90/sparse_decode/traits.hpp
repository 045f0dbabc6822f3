// The additions of a sparse decode block to a decode block: its problem, and the shared memory of its producer.
#pragma once

#include "common/params/sparse_decode_tma.hpp"
#include "common/selection.hpp"
#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/sparse_decode/kv_format.hpp"

namespace mla::sm_90 {

// Every query token is a sequence; its rows are its heads.
template <class KvFormat_, bool RETURNS_MAX_LOGITS_ = false>
struct SparseDecodeProblem {
  using Element = bf16;
  using OutElement = bf16;
  using KvFormat = KvFormat_;
  using Params = SparseDecodeTmaParams;
  static constexpr int HEAD_DIM_QK = KvFormat::HEAD_DIM_QK;
  static constexpr int HEAD_DIM_V = KvFormat::HEAD_DIM_V;
  static constexpr bool CONVERTS_Q = false;
  static constexpr bool ROTATES = false;
  static constexpr bool RETURNS_MAX_LOGITS = RETURNS_MAX_LOGITS_;

  MLA_DEVICE static int rows(const Params& params) { return params.heads; }
  MLA_DEVICE static int sequence_of_split(const Params& params, int split) { return split / params.num_splits; }
  MLA_DEVICE static bool combine_streams(const Params&) { return false; }
};

template <class KvFormat, class Cluster>
using SparseDecodePolicy =
    DecodePolicy<KvFormat::NEEDS_DEQUANT ? KvLoad::dequant : KvLoad::gather, Cluster, KvFormat::STAGES>;

// A producer warp's own memory: the lists of the query token, the state of the tile scheduler, and the addresses of the
// tokens that were looked up.
template <bool SCALES_APART>
struct ProducerScratch {
  uint8_t lists[64];          // TopkLists or StagedLists
  uint8_t scheduler[12];      // SparseTileScheduler
  uint8_t unused[4];
  uint32_t present[16];       // see ProducerDequant::present_at
  int32_t indices[32];        // of the next batch
  uint64_t rows[32];          // addresses of tokens
  uint32_t to_scales[SCALES_APART ? 32 : 1];  // from there to the scales, as the format counts, where they lie apart
};

// Sizes of a sparse decode block. CLUSTER_SIZE CTAs share the work of bringing a token's keys; of two, each brings half
// of every stage for both.
template <class Problem, class Policy>
struct SparseDecodeTraits : DecodeTraits<Problem, Policy> {
  using Base = DecodeTraits<Problem, Policy>;
  using KvFormat = typename Problem::KvFormat;
  using Params = typename Problem::Params;
  static constexpr int CLUSTER_SIZE = Base::Cluster::SHARES_KV ? 2 : 1;
  static_assert(CLUSTER_SIZE == 1 || KvFormat::NEEDS_DEQUANT, "two CTAs share the work of dequantising");
  static constexpr bool RETURNS_MAX_LOGITS = Problem::RETURNS_MAX_LOGITS;
  static_assert(!RETURNS_MAX_LOGITS || !Base::Cluster::MERGES_SPLITS, "clusters that merge results do not merge these");
  static constexpr int PRODUCER_WARPS = Base::PRODUCER_WARPS;
  static constexpr int STAGE_KEYS = BLOCK_N;
  static constexpr bool Q_APART = false;  // queries come through the ring of keys
  // One of each warp; before it, where rows are gathered, one of each lane whose copies have landed.
  static constexpr int FULL_ARRIVALS = KvFormat::NEEDS_DEQUANT ? PRODUCER_WARPS : 128 + PRODUCER_WARPS;
  static constexpr int WARP_KEYS = BLOCK_N / PRODUCER_WARPS;   // keys of a stage for each warp (of both CTAs)
  static constexpr int OWN_KEYS = WARP_KEYS / CLUSTER_SIZE;    // that a CTA's warp brings
  static constexpr int RAW_STAGES = KvFormat::RAW_STAGES;
  static constexpr bool HAS_ROPE = KvFormat::LATENT < KvFormat::HEAD_DIM_QK;  // of bf16, or of e4m3 in bare rows
  static constexpr bool HAS_KV_DESCALE = !KvFormat::HAS_SCALES;
  static constexpr int TAILS = 4 * 512;                             // where the tails of a raw stage begin
  static constexpr int RAW_STAGE_BYTES = TAILS + 4 * KvFormat::TAIL;  // of four keys
  static constexpr int RAW_BYTES = RAW_STAGES * RAW_STAGE_BYTES;      // of a warp

  // Shared memory behind the decode block's:
  // uint32[STAGES][CTAs][warps]: the keys of the stage that are present, as bits in the word of the warp that brings
  // them.
  static constexpr int PRESENT = (SharedStorage<Base>::BYTES + 15) / 16 * 16;
  static constexpr int PRESENT_BYTES = CLUSTER_SIZE * PRODUCER_WARPS * 4;  // of a stage
  static constexpr int SCRATCH = PRESENT + PRESENT_BYTES * Base::STAGES;   // ProducerScratch[warps]
  using Scratch = ProducerScratch<KvFormat::SCALES_APART>;
  static constexpr int SCRATCH_PRESENT = __builtin_offsetof(Scratch, present);  // within a warp's, like the next
  static constexpr int SCRATCH_INDICES = __builtin_offsetof(Scratch, indices);
  static constexpr int SCRATCH_ROWS = __builtin_offsetof(Scratch, rows);
  static constexpr int SCRATCH_SCALES = __builtin_offsetof(Scratch, to_scales);
  static constexpr int SCRATCH_BYTES = SCRATCH_SCALES + (KvFormat::SCALES_APART ? 128 : 0);
  static constexpr int RAW = SCRATCH + PRODUCER_WARPS * SCRATCH_BYTES;     // uint8[warps][RAW_BYTES]
  static constexpr int ROW_MAXIMA = RAW + PRODUCER_WARPS * RAW_BYTES;      // float[128][2]: of QK, if they are returned
  static constexpr int SHARED_BYTES = ROW_MAXIMA + (RETURNS_MAX_LOGITS ? 1024 : 0);
  static_assert(SHARED_BYTES <= SHARED_MEMORY_LIMIT, "a block has 227 KiB");

  // The bits of a stage's keys.
  MLA_DEVICE static uint32_t present(uint32_t shared, int stage) {
    uint32_t bits = 0;
#pragma unroll
    for (int cta = 0; cta < CLUSTER_SIZE; ++cta) {
      uint32_t words[4];
      ld_shared_v4(shared + PRESENT + stage * PRESENT_BYTES + cta * 16, words);
      bits |= words[0] | words[1] | words[2] | words[3];
    }
    return bits;
  }
};

// The pools are indexed through the address of the first member, because nvcc 13.0 makes other code when the array
// itself is indexed.
MLA_DEVICE const Pool& pool_at(const SparseDecodeTmaParams& params, int i) {
  return reinterpret_cast<const Pool*>(&params.pool[0].cache)[i];
}

}  // namespace mla::sm_90
