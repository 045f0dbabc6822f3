// Which keys a packed query row may see.
#pragma once

#include "common/device.hpp"
#include "common/params/decode.hpp"
#include "common/rank_keys.hpp"
#include "common/read_constant.hpp"
#include "common/visibility.hpp"
#include "common/work_tile.hpp"

namespace mla {

// The query rows of one sequence: q_len tokens from `first_token`, all heads of each.
struct SequenceRows {
  int sequence;
  int64_t first_token;  // in q (or in the packed q) and in out
  int q_len;
  int rows;  // q_len * heads
  int kv_len;

  MLA_DEVICE static SequenceRows of(const DecodeParams& p, int sequence) {
    SequenceRows s;
    s.sequence = sequence;
    if (p.cu_seqlens_q) {
      s.first_token = read_constant(p.cu_seqlens_q + sequence);
      s.q_len = read_constant(p.cu_seqlens_q + sequence + 1) - static_cast<int>(s.first_token);
    } else {
      s.first_token = static_cast<int64_t>(sequence) * p.q_len;
      s.q_len = p.q_len;
    }
    s.rows = s.q_len * p.heads;
    s.kv_len = read_constant(p.seq_lens + sequence);
    return s;
  }

  MLA_DEVICE static int token_of(const DecodeParams& p, int row) {
    return static_cast<int>(static_cast<uint32_t>(row) / static_cast<uint32_t>(p.heads));
  }

  // No key of the sequence below this is read; work tiles count keys from its window_origin.
  MLA_DEVICE int first_read(const DecodeParams& p) const { return first_key(kv_len, q_len, p.window_left); }

  // Keys below this are not visible to the token.
  MLA_DEVICE int first_visible(const DecodeParams& p, int token) const {
    return first_key(kv_len, q_len - token, p.window_left);
  }

  // Which drafts the token sees, by bits; the first is key kv_len - q_len. See tree_bits.
  MLA_DEVICE uint64_t tree_of(const DecodeParams& p, int token) const {
    return p.tree_mask ? static_cast<uint64_t>(p.tree_mask[first_token + token]) : ~uint64_t{0};
  }

  // Keys below this may be visible to the token: the last q_len keys of the sequence belong to the queries themselves.
  MLA_DEVICE int visible_keys(const DecodeParams& p, int token) const {
    if (!p.causal || p.tree_mask) return kv_len;
    const int later = q_len - 1 - token;
    return p.cp_tot_seq_lens ? keys_of_rank(p, read_constant(p.cp_tot_seq_lens + sequence) - later) : kv_len - later;
  }

  // Leaves out of a work tile the keys that none of `count` rows from `first_row` on sees, the first of which exists.
  MLA_DEVICE void clip_to_seen(const DecodeParams& p, int first_row, int count, WorkTile* tile) const {
    const int last_row = first_row + count < rows ? first_row + count - 1 : rows - 1;
    const int end = visible_keys(p, token_of(p, last_row));
    if (end < tile->end_key) tile->end_key = end;
    const int first = first_visible(p, token_of(p, first_row));
    if (first > tile->first_key) tile->first_key = first;
  }
};

}  // namespace mla
