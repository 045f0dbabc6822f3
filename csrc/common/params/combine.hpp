// The launch parameters of combine.
#pragma once
#include "common/device.hpp"

namespace mla {
struct CombineParams {
  const float* partial_out;      // [splits, rows, D_V], each row contiguous; rows = q_len x heads
  const float* partial_lse;      // [splits, rows], natural log
  const int32_t* split_indptr;   // [batch + 1], or null: num_splits for each sequence
  const int32_t* cu_seqlens_q;   // [batch + 1] tokens of out, or null: q_len for each sequence
  const float* attn_sink;        // [sink_heads] logits, or null
  void* out;                     // [tokens, heads, D_V] of out_type, each row contiguous
  float* lse;                    // [tokens, heads], anywhere: see lse_rows.hpp
  int64_t partial_split_stride;  // between splits of partial_out, in elements, like every stride here
  int64_t partial_row_stride;    // between rows of partial_out
  int64_t partial_lse_split_stride;  // between splits of partial_lse
  int64_t partial_lse_row_stride;  // between rows of partial_lse
  int64_t out_token_stride;      // between tokens of out
  int64_t out_head_stride;       // between heads of out
  int64_t lse_token_stride;      // between tokens of lse
  int64_t lse_head_stride;       // between heads of lse
  int32_t batch;                 // sequences
  int32_t q_len;                 // query tokens of a sequence, the most where cu_seqlens_q is given
  int32_t heads;                 // query heads
  int32_t sink_heads;            // row r has the logit of head r mod sink_heads
  int32_t num_splits;            // read where split_indptr is null
  int32_t out_type;              // 0 bf16, 1 fp16, 2 fp32
  int32_t skip_none;             // 1: leave sequences without a split; 2: and rows that decode marked as merged
  int32_t skip_single;           // 1: sequences with exactly one split are left as they are
  uint32_t rows_reciprocal;      // ceil(2^(31 + shift) / rows): n / rows = n * reciprocal >> 31 + shift for n < 2^31
  int32_t rows_shift;            // ceil(log2(rows))
  uint32_t heads_reciprocal;     // the same for heads
  int32_t heads_shift;           // ceil(log2(heads))
  int32_t workgroups;            // of the launch: persistent_combine's walk what a plan split
  uint32_t lse_tokens_reciprocal;  // division by lse_tokens, as by rows; it and what follows are not read on CDNA
  uint32_t lse_tokens_shift;     // ceil(log2(lse_tokens))
  float empty_lse;               // of a row that no split has keys for: -inf or +inf
  int64_t lse_batch_stride;      // added once for every lse_tokens tokens before a token
};
}  // namespace mla
