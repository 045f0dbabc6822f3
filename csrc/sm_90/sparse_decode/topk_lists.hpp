// The selected keys of a query token: one list of indices for each pool, taken one after the other.
#pragma once

#include "common/division.hpp"
#include "sm_90/sparse_decode/traits.hpp"

namespace mla::sm_90 {

// The lists of one query token as a warp's table in shared memory. In registers four pools would cost too much.
class TopkLists {
 public:
  // int32[4]: keys up to and including the pool's; int64[4]: addresses of lists; int32[2]: the work tile's keys.
  static constexpr int BYTES = 56;

  MLA_DEVICE explicit TopkLists(uint32_t table) : table_(table) {}

  // Looks up the lists of a query token; called by all lanes of the warp together. Returns the keys of all pools.
  MLA_DEVICE int open(const SparseDecodeTmaParams& params, int token) const {
    const int lane = warpgroup_thread() % 32;
    PoolList list{nullptr, 0};
    if (lane < params.pools) list = PoolList::of(pool_at(params, lane), token);
    int end = list.count;
#pragma unroll
    for (int apart = 1; apart < MAX_POOLS; apart *= 2) {
      const int before = __shfl_up_sync(~0u, end, apart);
      if (lane >= apart) end += before;
    }
    __syncwarp();
    if (lane < MAX_POOLS) {
      st_shared(table_ + lane * 4, end);
      // Less the keys of the pools before, so that a key's number finds its index.
      const int64_t first = reinterpret_cast<int64_t>(list.first) - 4 * static_cast<int64_t>(end - list.count);
      st_shared(table_ + 16 + lane * 8, first);
    }
    __syncwarp();
    return __shfl_sync(~0u, end, MAX_POOLS - 1);
  }

  // Sets the keys of the work tile. Called after `open`, when all lanes are done with those of the tile before.
  MLA_DEVICE void set_tile(int first, int end) const {
    if (warpgroup_thread() % 32 == 0) st_shared_v2(table_ + TILE, first, end);
    __syncwarp();
  }

  // The address of the index of the tile's key number `key`; null where the tile has no such key.
  MLA_DEVICE const int32_t* index_at(int key) const {
    int first, end;
    ld_shared_v2(table_ + TILE, first, end);
    key += first;
    if (key >= end) return nullptr;
    const int64_t list = ld_shared<int64_t>(table_ + 16 + pool_of(key) * 8);
    return reinterpret_cast<const int32_t*>(list) + key;
  }

  // The token that `index` names in the pool of the tile's key number `key`.
  MLA_DEVICE SelectedToken token_of(const SparseDecodeTmaParams& params, int key, int index) const {
    return token_in(params, pool_of(ld_shared<int>(table_ + TILE) + key), index);
  }

 protected:
  MLA_DEVICE static SelectedToken token_in(const SparseDecodeTmaParams& params, int number, int index) {
    const Pool& pool = pool_at(params, number);
    const uint32_t slot = static_cast<uint32_t>(index);
    const uint32_t page = divided(slot, pool.page_reciprocal, pool.page_shift);
    return SelectedToken{pool.cache + page * pool.page_bytes, slot - page * pool.page, static_cast<uint32_t>(pool.page),
                         slot < static_cast<uint32_t>(pool.slots), number};
  }
  MLA_DEVICE int pool_of(int key) const {
    int ends[MAX_POOLS];
    ld_shared_v4(table_, ends[0], ends[1], ends[2], ends[3]);
    return (key >= ends[0]) + (key >= ends[1]) + (key >= ends[2]);
  }

  static constexpr int TILE = 48;

  uint32_t table_;
};

}  // namespace mla::sm_90
