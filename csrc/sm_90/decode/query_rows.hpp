// From a block's rows to query tokens and heads, and how many keys each row sees. Row r of a sequence is head r % heads
// of query token r / heads.
#pragma once

#include "common/lse_rows.hpp"
#include "common/params/decode_tma.hpp"
#include "common/params/sparse_decode_tma.hpp"
#include "common/rank_keys.hpp"
#include "common/visibility.hpp"
#include "sm_90/decode/pipeline.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

// The query tokens of a sequence: the first among all tokens, and how many there are.
struct Queries {
  int64_t first_token;
  int count;
  MLA_DEVICE Queries(const DecodeTmaParams& params, int sequence) {
    if (params.cu_seqlens_q != nullptr) {
      const int begin = warp_uniform(ld_global(params.cu_seqlens_q + sequence));
      first_token = begin;
      count = warp_uniform(ld_global(params.cu_seqlens_q + sequence + 1)) - begin;
    } else {
      first_token = static_cast<int64_t>(sequence) * params.q_len;
      count = params.q_len;
    }
  }
  // In sparse decode every query token is a sequence.
  MLA_DEVICE Queries(const SparseDecodeTmaParams&, int token) : first_token(token), count(1) {}
};

// Divides rows by the number of heads with one multiplication; exact for rows below 2^32 / heads.
class Heads {
 public:
  MLA_DEVICE explicit Heads(const DecodeTmaParams& params)
      : heads_(params.heads), reciprocal_(params.heads_reciprocal) {}
  MLA_DEVICE explicit Heads(const SparseDecodeTmaParams& params)
      : heads_(params.heads), reciprocal_(0xFFFFFFFFu / params.heads + 1) {}
  MLA_DEVICE int token(int row) const { return heads_ == 1 ? row : __umulhi(row, reciprocal_); }
  MLA_DEVICE int head(int row, int token) const { return row - token * heads_; }

 private:
  int heads_;
  uint32_t reciprocal_;
};

struct QueryRow {
  int index;  // within the sequence
  int token;  // within the sequence
  int head;
  bool valid;  // the sequence has such a row
  MLA_DEVICE QueryRow(const Heads& heads, const Queries& queries, int index_)
      : index(index_), token(heads.token(index_)), head(heads.head(index_, token)), valid(token < queries.count) {}

  // One past the last key of the work tile that the row may see: with a causal mask, the last query sees all keys of
  // the sequence, and each query before it one key fewer.
  MLA_DEVICE int key_limit(const DecodeTmaParams& params, const Queries& queries, const WorkTile& tile) const {
    int seen = tile.length;
    if (params.causal && !(HAS_MASKS && params.tree_mask != nullptr)) {
      const int later = queries.count - 1 - token;
      const int32_t* totals = params.cp_tot_seq_lens;
      seen = totals ? keys_of_rank(params, ld_global(totals + tile.sequence) - later) : seen - later;
    }
    return seen < tile.end_key ? seen : tile.end_key;
  }

  // Which of the 32 keys from `first` on a window or a tree lets the row see, the lowest bit first.
  MLA_DEVICE uint32_t seen_bits(const DecodeTmaParams& params, const Queries& queries, int length, int first) const {
    if (params.tree_mask != nullptr) {
      const int last = queries.count - 1;  // rows without a query read its word
      const int64_t word = ld_global(params.tree_mask + queries.first_token + min(token, last));
      return tree_bits(static_cast<uint64_t>(word), first - (length - queries.count));
    }
    return window_bits(first_key(length, queries.count - token, params.window_left) - first);
  }
};

MLA_DEVICE bool has_window_or_tree(const DecodeTmaParams& params) {
  return HAS_MASKS && (params.window_left >= 0 || params.tree_mask != nullptr);
}

// The first key that any query token of a sequence sees; none before it is read.
MLA_DEVICE int first_read(const DecodeTmaParams& params, int sequence, int length) {
  if (!HAS_MASKS || params.window_left < 0) return 0;
  return first_key(length, Queries(params, sequence).count, params.window_left);
}

// One past the last of the work tile's keys from `first` on that every row of the sequence from `first_row` on sees; 0
// where the window of some row begins behind `first`.
MLA_DEVICE int common_limit(const DecodeTmaParams& params, const Heads& heads, const Queries& queries,
                            const WorkTile& tile, int first_row, int first) {
  if (HAS_MASKS && first < first_key(tile.length, 1, params.window_left)) return 0;
  const int limit = QueryRow(heads, queries, first_row).key_limit(params, queries, tile);
  return !HAS_MASKS || params.tree_mask == nullptr ? limit : min(limit, tile.length - queries.count);
}

// Elements from the lse of the sequence's first token to that of a row; in sparse decode all rows are of one token.
MLA_DEVICE int64_t lse_of_row_at(const DecodeTmaParams& params, int row) {
  const Heads heads(params);
  const int token = heads.token(row);
  return token * params.lse_token_stride + heads.head(row, token) * params.lse_head_stride;
}
MLA_DEVICE int64_t lse_of_row_at(const SparseDecodeTmaParams& params, int row) { return row * params.lse_head_stride; }

}  // namespace mla::sm_90
