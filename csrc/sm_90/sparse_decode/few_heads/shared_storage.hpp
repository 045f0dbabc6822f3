// The shared memory of a block of sparse decode for few heads, in place of decode's.
#pragma once

#include "sm_90/decode/shared_storage.hpp"
#include "sm_90/sparse_decode/few_heads/traits.hpp"

namespace mla::sm_90 {

template <class Traits>
struct FewHeadsStorage {
  uint8_t kv[Traits::STAGES * Traits::STAGE_BYTES];
  uint8_t q[Traits::Q_BYTES];
  uint8_t p[Traits::P_STAGES * Traits::P_BYTES];
  uint8_t raw[Traits::PRODUCER_WARPS * Traits::RAW_BYTES];
  uint8_t scratch[Traits::PRODUCER_WARPS * Traits::SCRATCH_BYTES];
  uint8_t present[Traits::STAGES * Traits::PRESENT_BYTES];
  alignas(16) float of_warp[4][Traits::ROWS];            // a max or a sum over the keys of each warp
  float factor[Traits::ROWS];                // divides O by the denominators
  alignas(16) int64_t out_at[Traits::ROWS];  // where the row goes; -1 where there is none
  alignas(16) PublishedTile tiles[Traits::TILE_STAGES];
  uint64_t kv_full[Traits::STAGES];
  uint64_t kv_empty[Traits::STAGES];
  uint64_t tile_full[Traits::TILE_STAGES];
  uint64_t tile_empty[Traits::TILE_STAGES];
  uint64_t q_full;
  uint64_t q_empty;
};

template <class Problem, class Policy>
struct SharedStorage<FewHeadsTraits<Problem, Policy>> {
  using Traits = FewHeadsTraits<Problem, Policy>;
  using Block = FewHeadsStorage<Traits>;
  static constexpr int KV = __builtin_offsetof(Block, kv);
  static constexpr int Q = __builtin_offsetof(Block, q);
  static constexpr int P = __builtin_offsetof(Block, p);
  static constexpr int OF_WARP = __builtin_offsetof(Block, of_warp);
  static constexpr int FACTOR = __builtin_offsetof(Block, factor);
  static constexpr int OUT_AT = __builtin_offsetof(Block, out_at);
  static constexpr int TILES = __builtin_offsetof(Block, tiles);
  static constexpr int BYTES = sizeof(Block);
  static_assert(KV == 0 && Traits::STAGE_BYTES % 1024 == 0 && Q % 512 == 0, "swizzles repeat every 1024 or 512 bytes");
  static_assert(Traits::RAW == __builtin_offsetof(Block, raw) && Traits::RAW % 128 == 0 &&
                    Traits::SCRATCH == __builtin_offsetof(Block, scratch) && Traits::SCRATCH % 16 == 0 &&
                    Traits::PRESENT == __builtin_offsetof(Block, present),
                "the producer's memory lies where it expects it");
  static_assert(BYTES <= SHARED_MEMORY_LIMIT, "a block has 227 KiB");
};

template <class Problem, class Policy>
struct Mbarriers<FewHeadsTraits<Problem, Policy>>
    : PipelineMbarriers<FewHeadsStorage<FewHeadsTraits<Problem, Policy>>, 0> {
  using Block = FewHeadsStorage<FewHeadsTraits<Problem, Policy>>;
  MLA_DEVICE explicit Mbarriers(uint32_t shared) : PipelineMbarriers<Block, 0>(shared) {}
  MLA_DEVICE uint32_t q_full() const { return this->at(__builtin_offsetof(Block, q_full), 0); }
  MLA_DEVICE uint32_t q_empty() const { return this->at(__builtin_offsetof(Block, q_empty), 0); }
};

}  // namespace mla::sm_90
