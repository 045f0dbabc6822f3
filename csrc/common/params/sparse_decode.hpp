// The parameters of a sparse_decode launch on gfx942 or gfx950.
#pragma once

#include "common/device.hpp"
#include "common/params/pool.hpp"

namespace mla {

// D_QK is 576 or 512, D_V is 512. Strides count elements.
struct SparseDecodeParams {
  const void* q;                 // [tokens, heads, D_QK]
  const float* attn_sink;        // [heads], or null
  const int32_t* plan;           // [words], or null: equal splits by num_splits
  void* out;                     // [tokens, heads, D_V]
  float* lse;                    // [tokens, heads]
  float* partial_out;            // [splits, heads, D_V], or null when nothing is split
  float* partial_lse;            // [splits, heads], or null when nothing is split
  int64_t q_token_stride;        // between query tokens
  int64_t q_head_stride;         // between heads of q
  int64_t out_token_stride;      // between tokens of out
  int64_t out_head_stride;       // between heads of out
  Pool pool[4];                  // one after the other; those from `pools` on are zeros
  int32_t tokens;                // query tokens
  int32_t heads;                 // query heads
  float softmax_scale;           // what scores are multiplied by
  int32_t pools;                 // 1 to 4
  int32_t num_splits;            // splits per query token when plan is null, at least 1
  int32_t split_size;            // keys per split in the batch-invariant mode, else 0
  int32_t grid_stride;           // workgroups that walk the work list
  uint32_t fp4;                  // bit i: pool i holds V4.1's tokens of 288 bytes
  const float* q_descale;        // [1], or null: 1. Of bare rows of fp8, like the next
  const float* kv_descale;       // [1], or null: 1
};

}  // namespace mla
