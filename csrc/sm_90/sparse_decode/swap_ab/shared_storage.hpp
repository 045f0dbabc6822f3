// The shared memory of a block of sparse decode with keys as the first operand.
#pragma once

#include "sm_90/decode/shared_storage.hpp"
#include "sm_90/sparse_decode/swap_ab/traits.hpp"

namespace mla::sm_90 {

// A producer warp's own memory.
struct alignas(16) SparseSwapAbScratch {
  uint8_t lists[56];      // TopkLists
  uint8_t scheduler[12];  // SparseTileScheduler
};

template <class Traits>
struct SparseSwapAbStorage {
  uint8_t q[Traits::COLUMN_BLOCKS * Traits::Q_BLOCK_BYTES];  // first as TMA brings them
  uint8_t vt[Traits::GROUPS * Traits::VT_BYTES];     // columns of V^T, of each warpgroup's step
  uint8_t p[Traits::GROUPS * Traits::P_STAGES * Traits::P_BYTES];
  uint8_t kv[Traits::STAGES * Traits::STAGE_BYTES];
  float of_warp[Traits::CONSUMERS / 32][Traits::ROWS];  // a max or a sum over the keys of each warp
  float of_group[Traits::GROUPS][Traits::ROWS];         // the running max
  float factor[Traits::ROWS];                           // divides O by the denominators
  alignas(16) int64_t out_at[Traits::ROWS];             // where the row goes; -1 where there is none
  alignas(16) PublishedTile tiles[Traits::TILE_STAGES];
  SparseSwapAbScratch scratch[4];
  uint32_t present[Traits::STAGES + 1];  // a bit for each key of a stage
  alignas(8) uint64_t kv_full[Traits::STAGES];
  uint64_t kv_empty[Traits::STAGES];
  uint64_t tile_full[Traits::TILE_STAGES];
  uint64_t tile_empty[Traits::TILE_STAGES];
  uint64_t q_full;
  uint64_t q_empty;
  uint64_t vt_empty[Traits::GROUPS];
};

template <class Problem, class Policy>
struct SharedStorage<SparseSwapAbTraits<Problem, Policy>> {
  using Block = SparseSwapAbStorage<SparseSwapAbTraits<Problem, Policy>>;
  static constexpr int Q = __builtin_offsetof(Block, q);
  static constexpr int VT = __builtin_offsetof(Block, vt);
  static constexpr int P = __builtin_offsetof(Block, p);
  static constexpr int KV = __builtin_offsetof(Block, kv);
  static constexpr int OF_WARP = __builtin_offsetof(Block, of_warp);
  static constexpr int OF_GROUP = __builtin_offsetof(Block, of_group);
  static constexpr int FACTOR = __builtin_offsetof(Block, factor);
  static constexpr int OUT_AT = __builtin_offsetof(Block, out_at);
  static constexpr int TILES = __builtin_offsetof(Block, tiles);
  static constexpr int SCRATCH = __builtin_offsetof(Block, scratch);
  static constexpr int PRESENT = __builtin_offsetof(Block, present);
  static constexpr int BYTES = sizeof(Block);
  static_assert(VT % 1024 == 0, "the swizzle repeats every 1024 bytes");
  static_assert(KV % 128 == 0, "a stage begins where the banks do");
  static_assert(BYTES <= SHARED_MEMORY_LIMIT, "a block has 227 KiB");
};

template <class Problem, class Policy>
struct Mbarriers<SparseSwapAbTraits<Problem, Policy>>
    : PipelineMbarriers<SparseSwapAbStorage<SparseSwapAbTraits<Problem, Policy>>, 0> {
  using Block = SparseSwapAbStorage<SparseSwapAbTraits<Problem, Policy>>;
  MLA_DEVICE explicit Mbarriers(uint32_t shared) : PipelineMbarriers<Block, 0>(shared) {}
  MLA_DEVICE uint32_t q_full() const { return this->at(__builtin_offsetof(Block, q_full), 0); }
  MLA_DEVICE uint32_t q_empty() const { return this->at(__builtin_offsetof(Block, q_empty), 0); }
  MLA_DEVICE uint32_t vt_empty(int group) const {
    return this->at(__builtin_offsetof(Block, vt_empty), group);
  }
};

// The position of a ring `stages` further on.
template <int STAGES>
MLA_DEVICE PipelineState<STAGES> advanced(PipelineState<STAGES> state, int stages) {
  state.stage += stages;
  while (state.stage >= STAGES) {
    state.stage -= STAGES;
    state.parity ^= 1;
  }
  return state;
}

}  // namespace mla::sm_90
