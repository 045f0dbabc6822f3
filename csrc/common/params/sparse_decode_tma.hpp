// The parameters of a sparse_decode launch on sm_90. TMA reads its maps where they lie in the launch parameters, on
// 64 bytes: so the maps come first, and the struct is aligned to 64.
#pragma once

#include "common/device.hpp"
#include "common/params/pool.hpp"

namespace mla {

// The queries are [tokens, heads, D_QK]; D_QK is 576 or 512, D_V is 512. Strides count elements.
struct alignas(64) SparseDecodeTmaParams {
  uint64_t q_map[16];            // the TMA map of the queries, or of their latent part
  uint64_t q_rope_map[16];       // the TMA map of their rope part, if they are in_parts; else zeros
  const float* attn_sink;        // [heads], or null
  const int32_t* plan;           // [words], or null: equal splits by num_splits
  void* out;                     // [tokens, heads, D_V]
  float* lse;                    // [tokens, heads], anywhere: see lse_rows.hpp
  float* partial_out;            // [splits, heads, D_V], or null when nothing is split
  float* partial_lse;            // [splits, heads], or null when nothing is split
  int64_t out_token_stride;      // between tokens of out
  int64_t out_head_stride;       // between heads of out
  int64_t lse_token_stride;      // between tokens of lse
  int64_t lse_head_stride;       // between heads of lse
  int64_t lse_batch_stride;      // added once for every lse_tokens tokens before a token
  Pool pool[4];                  // one after the other; those from `pools` on are zeros
  int32_t tokens;                // query tokens
  int32_t heads;                 // query heads
  int32_t in_parts;              // 1: the queries are two tensors, which have maps by head and token
  int32_t pools;                 // 1 to 4
  int32_t num_splits;            // splits per query token when plan is null, at least 1
  int32_t split_size;            // keys per split in the batch-invariant mode, else 0
  int32_t grid_stride;           // groups of blocks, as wide as the grid, that walk the work list: the grid's height
  uint32_t lse_tokens_reciprocal;  // division by lse_tokens, as by page
  uint32_t lse_tokens_shift;     // ceil(log2(lse_tokens))
  float empty_lse;               // of a row without keys: -inf or +inf
  float softmax_scale;           // positive
  float* max_logits;             // [tokens, heads] of -inf, raised to the largest scaled scores; or null. bf16 rows only
  uint32_t interleaved;          // bit i: in pool i a token's scales lie behind it, not behind all of its page; V4.1 only
  uint32_t fp4;                  // bit i: pool i holds V4.1's tokens of 288 bytes
  const float* q_descale;        // [1], or null: 1. Of bare rows of e4m3, like the next
  const float* kv_descale;       // [1], or null: 1
};

}  // namespace mla
