// The selected keys of a query token as stages of one record each: in a work tile every pool's keys begin a stage, and
// what its last stage has too many is absent.
#pragma once

#include "sm_90/sparse_decode/topk_lists.hpp"

namespace mla::sm_90 {

class StagedLists : public TopkLists {
 public:
  // int32[4]: after set_tile keys up to and including the pool's; int64[4]: addresses of lists; int32[4]: the first key
  // of each pool that is absent, whatever its index.
  static constexpr int BYTES = 64;

  using TopkLists::TopkLists;

  // Sets the keys of the work tile and returns its stages. Called once after `open`, when all lanes are done with the
  // keys of the tile before.
  template <int STAGE_KEYS>
  MLA_DEVICE uint32_t set_tile(int first, int end) const {
    const int lane = warpgroup_thread() % 32;
    const int pool = lane % MAX_POOLS;
    const int pool_end = ld_shared<int>(table_ + pool * 4);
    const int64_t list = ld_shared<int64_t>(table_ + LISTS + pool * 8);
    const int before = __shfl_up_sync(~0u, pool_end, 1);
    const int begin = max(pool == 0 ? 0 : before, first);
    const int keys = max(min(pool_end, end) - begin, 0);
    int stages = (keys + STAGE_KEYS - 1) / STAGE_KEYS;
#pragma unroll
    for (int apart = 1; apart < MAX_POOLS; apart *= 2) {
      const int others = __shfl_up_sync(~0u, stages, apart);
      if (pool >= apart) stages += others;
    }
    const int start = (stages - (keys + STAGE_KEYS - 1) / STAGE_KEYS) * STAGE_KEYS;
    __syncwarp();
    if (lane < MAX_POOLS) {
      st_shared(table_ + pool * 4, stages * STAGE_KEYS);
      st_shared(table_ + LISTS + pool * 8, list + 4 * static_cast<int64_t>(begin - start));
      st_shared(table_ + ABSENT + pool * 4, start + keys);
    }
    __syncwarp();
    return __shfl_sync(~0u, stages, MAX_POOLS - 1);
  }

  template <int STAGE_KEYS>
  MLA_DEVICE uint32_t stages_up_to(int pool) const {
    return ld_shared<uint32_t>(table_ + pool * 4) / STAGE_KEYS;
  }

  MLA_DEVICE const int32_t* index_at(int key) const {
    const int pool = pool_of(key);
    if (key >= ld_shared<int>(table_ + ABSENT + pool * 4)) return nullptr;
    return reinterpret_cast<const int32_t*>(ld_shared<int64_t>(table_ + LISTS + pool * 8)) + key;
  }

  MLA_DEVICE SelectedToken token_of(const SparseDecodeTmaParams& params, int key, int index) const {
    return token_in(params, pool_of(key), index);
  }

 private:
  static constexpr int LISTS = 16, ABSENT = 48;
};

}  // namespace mla::sm_90
