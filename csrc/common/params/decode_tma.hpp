// The parameters of a decode launch on sm_90. TMA reads its maps where they lie in the launch parameters, on 64 bytes:
// so the maps come first, and the struct is aligned to 64.
#pragma once

#include "common/device.hpp"

namespace mla {

// Strides count elements. D_QK is the latent, of D_V values, and a rope part. Keys of a page lie D_QK apart. A query
// row is (token i of the sequence, head h) = row i * heads + h. A reciprocal and its shift are ceil(2^(31 + shift) / n)
// and ceil(log2(n)): numbers below 2^31 are divided by n by one multiplication.
struct alignas(64) DecodeTmaParams {
  uint64_t kv_map[16];           // the 128-byte TMA map of kv_cache; zeros where keys come without one
  uint64_t kv_rest_map[16];      // the same in boxes of the columns that a box of kv_map leaves of a row; or zeros
  uint64_t q_map[16];            // the TMA map of the queries, or of their latent part; zeros where they are e4m3
  uint64_t q_rope_map[16];       // the TMA map of their rope part, if they are in_parts; else zeros
  const void* q;                 // [tokens, heads, D_QK], rows q_row_stride apart; unused where they are in_parts
  const void* kv_cache;          // [pages, page, D_QK]
  const int32_t* seq_lens;       // [batch]
  const int32_t* page_ids;       // [batch, page_ids_stride], or [kv_indptr[batch]]
  const int32_t* kv_indptr;      // [batch + 1], or null: first entry of a sequence in page_ids
  const int32_t* cu_seqlens_q;   // [batch + 1], or null
  const float* q_descale;        // [1], or null
  const float* kv_descale;       // [1], or null
  const float* attn_sink;        // [heads], or null
  const int32_t* plan;           // [words], or null: equal splits by num_splits
  const int32_t* cp_tot_seq_lens;  // [batch], or null: keys on all ranks; seq_lens has this one's
  const int64_t* tree_mask;      // [tokens], or null: bit j says that query token j of the sequence is seen
  void* out;                     // [tokens, heads, D_V]
  float* lse;                    // [tokens, heads], anywhere: see lse_rows.hpp
  float* partial_out;            // [splits, q_len * heads, D_V], or null when nothing is split
  float* partial_lse;            // [splits, q_len * heads], or null when nothing is split
  int64_t q_row_stride;          // between rows of queries
  int64_t kv_page_stride;        // between pages
  int64_t page_ids_stride;       // between sequences; unused with kv_indptr
  int64_t out_token_stride;      // between tokens of out
  int64_t out_head_stride;       // between heads of out
  int64_t lse_token_stride;      // between tokens of lse
  int64_t lse_head_stride;       // between heads of lse
  int64_t lse_batch_stride;      // added once for every lse_tokens tokens before a token
  int32_t batch;                 // sequences
  int32_t heads;                 // query heads
  uint32_t heads_reciprocal;     // 2^32 / heads, rounded up, of more than one: row / heads by one multiplication
  int32_t q_len;                 // of the longest sequence
  int32_t rows;                  // q_len * heads
  int32_t in_parts;              // 1: the queries are two tensors, which have maps by head and token
  int32_t page;                  // keys per page
  uint32_t page_reciprocal;      // of page
  uint32_t page_shift;           // of page
  int32_t num_splits;            // splits per sequence when plan is null, at least 1
  uint32_t splits_reciprocal;    // of num_splits
  uint32_t splits_shift;         // of num_splits
  int32_t split_size;            // keys per split in the batch-invariant mode, with a plan, too; else 0
  int32_t fold_size;             // keys of the splits that a CTA folds to the results of its work tiles; 0: none
  int32_t fold_slot;             // of partial_out: behind it each CTA has 64 rows to fold in
  int32_t page_ids_width;        // entries of a sequence, 0 with kv_indptr
  int32_t plan_words;            // 0 without a plan
  int32_t grid_stride;           // rows of the grid, each of which walks the work list
  int32_t streaming;             // 1: streaming combine waits for the words of each block's one partial (sm_90/combine)
  int32_t causal;                // 1: query i of n sees keys up to seq_len - n + i
  int32_t window_left;           // keys left of a query token, without its own, that it sees; negative: all
  int32_t cp_interleave;         // keys in a row on one rank
  int32_t cp_period;             // cp_interleave * ranks
  uint32_t cp_period_reciprocal;  // of cp_period
  uint32_t cp_period_shift;      // of cp_period
  int32_t cp_offset;             // cp_interleave * this rank
  uint32_t lse_tokens_reciprocal;  // of the tokens that lse_batch_stride counts
  uint32_t lse_tokens_shift;     // of the same
  float empty_lse;               // of a row that sees no key: -inf or +inf
  float softmax_scale;           // positive
  const float* rope_cos_sin;     // [max_len, 64], or null: keys are cached un-rotated; row j rotates the key at position j
};

}  // namespace mla
