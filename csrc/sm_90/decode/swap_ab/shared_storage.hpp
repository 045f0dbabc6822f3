// The shared memory of a block of swap_ab, in place of decode's.
#pragma once

#include "sm_90/decode/shared_storage.hpp"
#include "sm_90/decode/swap_ab/traits.hpp"

namespace mla::sm_90 {

// The softmax state of a query row.
struct ScaleAndMax {
  float scale;  // of its scores, with that of its queries
  float max;    // the running max, in units of log2
};

template <class Traits>
struct SwapAbStorage {
  uint8_t q[Traits::COLUMN_BLOCKS * Traits::Q_BLOCK_BYTES];
  uint8_t p[Traits::P_STAGES * Traits::P_BYTES];
  uint8_t kv[Traits::STAGES * Traits::STAGE_BYTES];
  alignas(16) ScaleAndMax rows[Traits::ROWS];
  float factor[Traits::ROWS];              // rescales O, or divides it by the denominators
  int32_t key_limit[Traits::ROWS];         // one past the last key that the row sees
  int64_t out_at[Traits::ROWS];            // where the row goes; -1 where there is none
  float of_warp[8][Traits::ROWS];          // a max or a sum over the keys of each warp
  alignas(16) PublishedTile tiles[Traits::TILE_STAGES];
  uint64_t kv_full[Traits::STAGES];
  uint64_t kv_empty[Traits::STAGES];
  uint64_t tile_full[Traits::TILE_STAGES];
  uint64_t tile_empty[Traits::TILE_STAGES];
};

template <class Problem, class Policy>
struct SharedStorage<SwapAbTraits<Problem, Policy>> {
  using Block = SwapAbStorage<SwapAbTraits<Problem, Policy>>;
  static constexpr int Q = __builtin_offsetof(Block, q);
  static constexpr int P = __builtin_offsetof(Block, p);
  static constexpr int KV = __builtin_offsetof(Block, kv);
  static constexpr int SCALE_AND_MAX = __builtin_offsetof(Block, rows);
  static constexpr int FACTOR = __builtin_offsetof(Block, factor);
  static constexpr int KEY_LIMIT = __builtin_offsetof(Block, key_limit);
  static constexpr int OUT_AT = __builtin_offsetof(Block, out_at);
  static constexpr int OF_WARP = __builtin_offsetof(Block, of_warp);
  static constexpr int TILES = __builtin_offsetof(Block, tiles);
  static constexpr int BYTES = sizeof(Block);
  static_assert(KV % 16 == 0, "bulk copies begin at multiples of 16 bytes");
  static_assert(BYTES <= SHARED_MEMORY_LIMIT, "a block has 227 KiB");
};

template <class Problem, class Policy>
struct Mbarriers<SwapAbTraits<Problem, Policy>> : PipelineMbarriers<SwapAbStorage<SwapAbTraits<Problem, Policy>>, 0> {
  MLA_DEVICE explicit Mbarriers(uint32_t shared)
      : PipelineMbarriers<SwapAbStorage<SwapAbTraits<Problem, Policy>>, 0>(shared) {}
};

}  // namespace mla::sm_90
