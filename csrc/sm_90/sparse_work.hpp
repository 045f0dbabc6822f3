// Which keys of which query token a block of sparse decode takes next, and where a key's token lies.
#pragma once

#include "common/division.hpp"
#include "sm_90/loader.hpp"
#include "sm_90/sparse_policy.hpp"

namespace mla::sm90 {

// A plan's items in order of worker, or equal cuts: query token i / num_splits, cut i % num_splits. How many keys a
// token has is known only when its lists have been looked up. Where a warp is in it lies in shared memory of its own:
// it is wanted once an item, and registers are scarce.
class SparseWork {
 public:
  using Params = SparseDecodeTmaParams;

  static constexpr int BYTES = 12;

  MLA_DEVICE SparseWork(const Params& params, uint32_t notes) : params_(params), notes_(notes) {
    write(TAKEN, 0);
    const int worker = blockIdx.y;
    if (params.plan != nullptr)
      open_worker(worker);
    else
      write(CURSOR, worker);
  }

  MLA_DEVICE bool more() const {
    if (params_.plan == nullptr) return read(CURSOR) < params_.tokens * params_.num_splits;
    return read(WORKER) < workers();
  }

  // Items so far.
  MLA_DEVICE int taken() const { return read(TAKEN); }

  // The query token of the next item.
  MLA_DEVICE int token() const {
    return params_.plan != nullptr ? uniform(__ldg(words(read(CURSOR)))) : read(CURSOR) / params_.num_splits;
  }

  // The next item, of a token with `keys` keys.
  MLA_DEVICE Item take(int token, int keys) {
    Item item;
    const int cursor = read(CURSOR);
    write(TAKEN, read(TAKEN) + 1);
    item.sequence = token;
    item.length = keys;
    if (params_.plan != nullptr) {
      const int32_t* at = words(cursor);
      item.first = uniform(__ldg(at + 1));
      item.end = uniform(__ldg(at + 2));
      item.partial_row = uniform(__ldg(at + 3));
      const int worker = read(WORKER);
      if (cursor + 1 < uniform(__ldg(bounds() + worker + 1)))
        write(CURSOR, cursor + 1);
      else
        open_worker(worker + params_.workers);
    } else {
      const int splits = params_.num_splits;
      const int cut = cursor - token * splits;
      int size = params_.split_size;
      if (size == 0) size = ((keys + KEYS - 1) / KEYS + splits - 1) / splits * KEYS;
      const int64_t first = static_cast<int64_t>(cut) * size;
      item.first = first < keys ? static_cast<int>(first) : keys;
      // The last cut is open: whatever split_size, no key is left over.
      item.end = cut + 1 == splits || first + size > keys ? keys : item.first + size;
      item.partial_row = splits > 1 ? cursor : -1;
      write(CURSOR, cursor + params_.workers);
    }
    if (item.end > keys) item.end = keys;
    return item;
  }

 private:
  static constexpr int KEYS = 32;  // equal cuts are multiples of a stage

  enum : int { WORKER = 0, CURSOR = 4, TAKEN = 8 };

  MLA_DEVICE int read(int what) const {
    int value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(notes_ + what) : "memory");
    return uniform(value);
  }
  MLA_DEVICE void write(int what, int value) const {
    __syncwarp();
    if (group_thread() % 32 == 0) asm volatile("st.shared.b32 [%0], %1;" ::"r"(notes_ + what), "r"(value) : "memory");
    __syncwarp();
  }

  MLA_DEVICE const int32_t* words(int item) const {
    return params_.plan + uniform(__ldg(params_.plan + PlanHeader::items)) + 4 * static_cast<int64_t>(item);
  }

  MLA_DEVICE int workers() const { return uniform(__ldg(params_.plan + PlanHeader::workers)); }
  MLA_DEVICE const int32_t* bounds() const {
    return params_.plan + uniform(__ldg(params_.plan + PlanHeader::work_indptr));
  }

  // The first worker with items from `worker` on, in steps of the launch's workers.
  MLA_DEVICE void open_worker(int worker) const {
    const int count = workers();
    for (; worker < count; worker += params_.workers) {
      const int first = uniform(__ldg(bounds() + worker));
      write(CURSOR, first);
      if (first < uniform(__ldg(bounds() + worker + 1))) break;
    }
    write(WORKER, worker);
  }

  const Params& params_;
  uint32_t notes_;
};

// A token that an index names.
struct Selected {
  const uint8_t* page;  // where its page begins
  uint32_t in_page;
  uint32_t tokens;  // of the page
  bool present;     // the index lies in the pool
};

// The lists of one query token as a warp's table in shared memory: in registers four pools would cost too much.
class Lists {
 public:
  // int32[4], keys up to and including the pool's; int64[4], addresses of lists; int32[2], the item's
  // keys.
  static constexpr int BYTES = 56;

  MLA_DEVICE explicit Lists(uint32_t table) : table_(table) {}

  // Looks up the lists of a query token; all lanes of the warp together. Returns the keys of all pools.
  MLA_DEVICE int open(const SparseDecodeTmaParams& params, int token) const {
    const int lane = group_thread() % 32;
    PoolList list{nullptr, 0};
    if (lane < params.pools) list = PoolList::of(pool_at(params, lane), token);
    int end = list.count;
#pragma unroll
    for (int apart = 1; apart < MOST_POOLS; apart *= 2) {
      const int before = __shfl_up_sync(~0u, end, apart);
      if (lane >= apart) end += before;
    }
    __syncwarp();
    if (lane < MOST_POOLS) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(table_ + lane * 4), "r"(end) : "memory");
      // Less the keys of the pools before, so that a key's number finds its index.
      const int64_t first = reinterpret_cast<int64_t>(list.first) - 4 * static_cast<int64_t>(end - list.count);
      asm volatile("st.shared.b64 [%0], %1;" ::"r"(table_ + 16 + lane * 8), "l"(first) : "memory");
    }
    __syncwarp();
    return __shfl_sync(~0u, end, MOST_POOLS - 1);
  }

  // The item's keys. Behind `open`, when all lanes are done with those of the item before.
  MLA_DEVICE void bound(int first, int end) const {
    if (group_thread() % 32 == 0)
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(table_ + ITEM), "r"(first), "r"(end) : "memory");
    __syncwarp();
  }

  // Where the index of the item's key number `key` lies; null where it has none.
  MLA_DEVICE const int32_t* index_at(int key) const {
    int first, end;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(end) : "r"(table_ + ITEM) : "memory");
    key += first;
    if (key >= end) return nullptr;
    int64_t list;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(list) : "r"(table_ + 16 + pool_of(key) * 8) : "memory");
    return reinterpret_cast<const int32_t*>(list) + key;
  }

  // The token that `index` names in the pool of the item's key number `key`.
  MLA_DEVICE Selected token_of(const SparseDecodeTmaParams& params, int key, int index) const {
    int first;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(first) : "r"(table_ + ITEM) : "memory");
    const Pool& pool = pool_at(params, pool_of(first + key));
    const uint32_t slot = static_cast<uint32_t>(index);
    const uint32_t number = divided(slot, pool.page_magic, pool.page_shift);
    return Selected{pool.cache + number * pool.page_bytes, slot - number * pool.page, static_cast<uint32_t>(pool.page),
                    slot < static_cast<uint32_t>(pool.slots)};
  }

 private:
  MLA_DEVICE int pool_of(int key) const {
    int ends[MOST_POOLS];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(ends[0]), "=r"(ends[1]), "=r"(ends[2]), "=r"(ends[3])
                 : "r"(table_)
                 : "memory");
    return (key >= ends[0]) + (key >= ends[1]) + (key >= ends[2]);
  }

  static constexpr int ITEM = 48;

  uint32_t table_;
};

}  // namespace mla::sm90
