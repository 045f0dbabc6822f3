// The parameters of a sparse_decode launch on sm_90. TMA reads its map where it lies in the launch parameters, on 64
// bytes: so the map comes first, and the struct is aligned to 64.
#pragma once

#include "common/device.hpp"

namespace mla {

// The queries are [tokens, heads, D_QK]; D_QK is 576 or 512, D_V is 512. The pools are as in SparseDecodeParams.
// Strides count elements unless they say bytes.
struct alignas(64) SparseDecodeTmaParams {
  uint64_t q_map[16];            // the TMA map of the queries as one matrix of rows
  const float* attn_sink;        // [heads], or null
  const int32_t* plan;           // [words], or null: equal splits by num_splits
  void* out;                     // [tokens, heads, D_V]
  float* lse;                    // [tokens, heads], anywhere: see lse_rows.hpp
  float* partial_out;            // [splits, heads, D_V], or null when nothing is split
  float* partial_lse;            // [splits, heads], or null when nothing is split
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  int64_t lse_batch_stride;      // added once for every lse_tokens tokens before a token
  const uint8_t* cache_0;        // [pages, page, token bytes]
  const int32_t* indices_0;      // [tokens, topk] or [entries]: page number * page + token
  const int32_t* indptr_0;       // [tokens + 1] of ragged indices, or null: dense ones
  const int32_t* lengths_0;      // [tokens / tokens_per_length] of dense indices, or null: all topk count
  int64_t page_bytes_0;          // between pages
  int64_t index_stride_0;        // between query tokens of dense indices
  int32_t slots_0;               // pages * page
  int32_t page_0;                // tokens of a page
  uint32_t page_magic_0;         // ceil(2^(31 + page_shift) / page): slot / page by one multiplication
  uint32_t page_shift_0;         // ceil(log2(page))
  int32_t topk_0;
  int32_t tokens_per_length_0;   // query tokens that share an entry of lengths
  const uint8_t* cache_1;        // [pages, page, token bytes], the second pool and so on
  const int32_t* indices_1;      // [tokens, topk] or [entries]
  const int32_t* indptr_1;       // [tokens + 1], or null
  const int32_t* lengths_1;      // [tokens / tokens_per_length], or null
  int64_t page_bytes_1;
  int64_t index_stride_1;
  int32_t slots_1;
  int32_t page_1;
  uint32_t page_magic_1;
  uint32_t page_shift_1;
  int32_t topk_1;
  int32_t tokens_per_length_1;
  const uint8_t* cache_2;        // [pages, page, token bytes]
  const int32_t* indices_2;      // [tokens, topk] or [entries]
  const int32_t* indptr_2;       // [tokens + 1], or null
  const int32_t* lengths_2;      // [tokens / tokens_per_length], or null
  int64_t page_bytes_2;
  int64_t index_stride_2;
  int32_t slots_2;
  int32_t page_2;
  uint32_t page_magic_2;
  uint32_t page_shift_2;
  int32_t topk_2;
  int32_t tokens_per_length_2;
  const uint8_t* cache_3;        // [pages, page, token bytes]
  const int32_t* indices_3;      // [tokens, topk] or [entries]
  const int32_t* indptr_3;       // [tokens + 1], or null
  const int32_t* lengths_3;      // [tokens / tokens_per_length], or null
  int64_t page_bytes_3;
  int64_t index_stride_3;
  int32_t slots_3;
  int32_t page_3;
  uint32_t page_magic_3;
  uint32_t page_shift_3;
  int32_t topk_3;
  int32_t tokens_per_length_3;
  int32_t tokens;                // query tokens
  int32_t heads;
  int32_t pools;                 // 1 to 4
  int32_t num_splits;            // splits per query token when plan is null, at least 1
  int32_t split_size;            // keys per split in the batch-invariant mode, else 0
  int32_t grid_stride;           // groups of blocks, as wide as the grid, that walk the work list: the grid's height
  uint32_t lse_tokens_magic;     // division by lse_tokens, as by page
  uint32_t lse_tokens_shift;
  float empty_lse;               // of a row without keys: -inf or +inf
  float softmax_scale;           // positive
};

}  // namespace mla
