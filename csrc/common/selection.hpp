// Which cached tokens a query token attends to: one list per pool, taken one after the other as keys 0, 1, 2, ...
#pragma once

#include "common/device.hpp"
#include "common/params/sparse_decode.hpp"

namespace mla {

constexpr int MAX_POOLS = sizeof(SparseDecodeParams::pool) / sizeof(Pool);

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
