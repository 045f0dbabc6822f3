// Which cached tokens a query token attends to: one list per pool, taken one after the other as keys 0, 1, 2, ...
#pragma once

#include "common/device.hpp"
#include "common/params/sparse_decode.hpp"

namespace mla {

// One group of SparseDecodeParams' pool fields.
struct Pool {
  const uint8_t* cache;
  const int32_t* indices;
  const int32_t* indptr;
  const int32_t* lengths;
  int64_t page_bytes;
  int64_t index_stride;
  int32_t slots;
  int32_t page;
  uint32_t page_magic;
  uint32_t page_shift;
  int32_t topk;
  int32_t tokens_per_length;
};

constexpr int MAX_POOLS = 4;
static_assert(__builtin_offsetof(SparseDecodeParams, cache_1) - __builtin_offsetof(SparseDecodeParams, cache_0) ==
                  sizeof(Pool),
              "selection: Pool mirrors the parameters");
static_assert(__builtin_offsetof(SparseDecodeParams, tokens) - __builtin_offsetof(SparseDecodeParams, cache_0) ==
                  MAX_POOLS * sizeof(Pool),
              "selection: the parameters have MAX_POOLS groups");

MLA_DEVICE const Pool& pool_at(const SparseDecodeParams& p, int i) {
  return reinterpret_cast<const Pool*>(&p.cache_0)[i];
}

// The indices of one query token in one pool.
struct PoolList {
  const int32_t* first;
  int count;

  // Never past what `indices` holds, whatever indptr and lengths say.
  MLA_DEVICE static PoolList of(const Pool& pool, int token) {
    int64_t first = token * pool.index_stride;
    int count = pool.topk;
    if (pool.indptr) {
      const int begin = pool.indptr[token] > 0 ? pool.indptr[token] : 0;
      const int end = pool.indptr[token + 1];
      first = begin;
      count = (end < pool.topk ? end : pool.topk) - begin;
    } else if (pool.lengths) {
      const int length = pool.lengths[static_cast<uint32_t>(token) / static_cast<uint32_t>(pool.tokens_per_length)];
      count = length < count ? length : count;
    }
    return PoolList{pool.indices + first, count > 0 ? count : 0};
  }
};

}  // namespace mla
