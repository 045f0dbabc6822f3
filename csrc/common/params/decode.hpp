// The parameters of a decode launch on gfx942 or gfx950.
#pragma once

#include "common/device.hpp"

namespace mla {

// Strides count elements. D_QK is 576 (512 latent + 64 rope) or 512, D_V is 512.
// A query row is (token i of the sequence, head h) = row i * heads + h; rows = q_len * heads of the longest sequence.
struct DecodeParams {
  const void* q;                 // [batch, q_len, heads, D_QK], or [tokens, heads, D_QK] with cu_seqlens_q
  const void* kv_cache;          // [pages, page, D_QK]
  const int32_t* seq_lens;       // [batch]
  const int32_t* block_table;    // [batch, block_table_stride], or null
  const int32_t* kv_indptr;      // [batch + 1], or null: first entry of a sequence in kv_indices
  const int32_t* kv_indices;     // [kv_indptr[batch]], or null: page numbers
  const int32_t* cu_seqlens_q;   // [batch + 1], or null
  const float* q_descale;        // [1], or null
  const float* kv_descale;       // [1], or null
  const float* attn_sink;        // [heads], or null
  const float* rope_cos_sin;     // [max_len, 64], or null
  const int32_t* plan;           // [words], or null: equal splits by num_splits
  const int32_t* cp_tot_seq_lens;  // [batch], or null: keys on all ranks; seq_lens has this one's
  const int64_t* tree_mask;      // [tokens], or null: bit j says that query token j of the sequence is seen
  void* out;                     // [tokens, heads, D_V]
  float* lse;                    // [tokens, heads]
  float* partial_out;            // [splits, rows, D_V], or null when nothing is split
  float* partial_lse;            // [splits, rows], or null when nothing is split
  int64_t q_batch_stride;        // between sequences; unused with cu_seqlens_q
  int64_t q_token_stride;        // between tokens
  int64_t q_head_stride;         // between heads
  int64_t kv_page_stride;        // between pages
  int64_t kv_token_stride;       // between keys of a page
  int64_t block_table_stride;    // between sequences
  int64_t out_token_stride;      // between tokens of out
  int64_t out_head_stride;       // between heads of out
  int32_t batch;                 // sequences
  int32_t heads;                 // query heads
  int32_t q_len;                 // of the longest sequence
  int32_t rows;                  // q_len * heads
  int32_t page;                  // keys per page
  uint32_t page_reciprocal;      // ceil(2^(31 + page_shift) / page): key / page by one multiplication
  uint32_t page_shift;           // ceil(log2(page))
  int32_t num_splits;            // splits per sequence when plan is null, at least 1
  int32_t split_size;            // keys per split in the batch-invariant mode, else 0
  int32_t grid_stride;           // workgroups that walk the work list
  int32_t causal;                // 1: query i of n sees keys up to seq_len - n + i
  int32_t window_left;           // keys left of a query token, without its own, that it sees; negative: all
  int32_t cp_interleave;         // keys in a row on one rank
  int32_t cp_period;             // cp_interleave * ranks
  uint32_t cp_period_reciprocal;  // divides by cp_period, as page_reciprocal by page
  uint32_t cp_period_shift;      // ceil(log2(cp_period))
  int32_t cp_offset;             // cp_interleave * this rank
  float softmax_scale;           // what scores are multiplied by
};

}  // namespace mla
