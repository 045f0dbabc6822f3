// Asks L2 for the records that a block reads first while the previous kernel still runs.
//
// That kernel may still be writing indices and lengths, so they decide only what is prefetched; they are read past L1,
// which would keep stale values; and whatever they are, no address outside the tensors follows from them.
#pragma once

#include "common/division.hpp"
#include "common/split_keys.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/tma.hpp"
#include "sm_90/sparse_decode/few_heads/traits.hpp"

namespace mla::sm_90 {

template <class Traits>
class FewHeadsPrologue {
  using KvFormat = typename Traits::KvFormat;
  using Params = typename Traits::Params;
  static constexpr int KEYS = 2 * Traits::STAGE_KEYS;

 public:
  // Called before griddep_wait, by all threads. Each of the first has a key of an even split. Of a plan's tiles, and of
  // ragged lists, which take more steps to find, nothing is prefetched.
  MLA_DEVICE static void prefetch(const Params& params) {
    if (params.plan != nullptr || thread_id() >= KEYS) return;
    const int token = blockIdx.y / params.num_splits, split = blockIdx.y % params.num_splits;
    int keys = 0;
    for (int i = 0; i < params.pools; ++i) keys += count_of(pool_at(params, i), token);
    int size = split_keys(params.split_size, keys);
    if (size == 0) size = ((keys + BLOCK_N - 1) / BLOCK_N + params.num_splits - 1) / params.num_splits * BLOCK_N;
    int key = split * size + thread_id();
    for (int i = 0; i < params.pools; ++i) {
      const Pool& pool = pool_at(params, i);
      const int count = count_of(pool, token);
      if (key < count) return prefetch_record(params, pool, i, token, key);
      key -= count;
    }
  }

 private:
  MLA_DEVICE static int count_of(const Pool& pool, int token) {
    if (pool.indptr != nullptr) return 0;
    if (pool.lengths == nullptr) return pool.topk;
    return max(0, min(pool.topk, ld_relaxed_gpu(pool.lengths + token / pool.tokens_per_length)));
  }

  MLA_DEVICE static void prefetch_record(const Params& params, const Pool& pool, int number, int token, int key) {
    const uint32_t slot = ld_relaxed_gpu(pool.indices + token * pool.index_stride + key);
    if (slot >= static_cast<uint32_t>(pool.slots)) return;
    const uint32_t page = divided(slot, pool.page_reciprocal, pool.page_shift);
    const SelectedToken found{pool.cache + page * pool.page_bytes, slot - page * pool.page,
                              static_cast<uint32_t>(pool.page), true, number};
    const uint8_t* row = found.page + KvFormat::row_at(params, found);
    bulk_prefetch(row, bytes_of(params, number));
    if constexpr (KvFormat::SCALES_APART) {
      uint32_t to_scales = KvFormat::to_scales(params, found);
      if constexpr (KvFormat::ANY_V41) to_scales &= ~KvFormat::FP4;
      prefetch_l2(row + to_scales * uint64_t{KvFormat::SCALE_BYTES});
    }
  }

  // Of a record, without scales that lie apart from it.
  MLA_DEVICE static int bytes_of(const Params& params, int pool) {
    if constexpr (KvFormat::ANY_V41)
      if (KvFormat::is_fp4(params, pool)) return 256;
    if constexpr (KvFormat::SCALES_APART && KvFormat::LATENT == 512)
      return 512;
    else
      return KvFormat::TOKEN_BYTES;
  }
};

}  // namespace mla::sm_90
