// Which keys a packed query row may see.
#pragma once

#include "common/device.hpp"
#include "common/params/decode.hpp"
#include "common/rank_keys.hpp"

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
      s.first_token = p.cu_seqlens_q[sequence];
      s.q_len = p.cu_seqlens_q[sequence + 1] - static_cast<int>(s.first_token);
    } else {
      s.first_token = static_cast<int64_t>(sequence) * p.q_len;
      s.q_len = p.q_len;
    }
    s.rows = s.q_len * p.heads;
    s.kv_len = p.seq_lens[sequence];
    return s;
  }

  MLA_DEVICE static int token_of(const DecodeParams& p, int row) {
    return static_cast<int>(static_cast<uint32_t>(row) / static_cast<uint32_t>(p.heads));
  }

  // Keys below this are visible to the token: the last q_len keys of the sequence belong to the queries themselves.
  MLA_DEVICE int visible_keys(const DecodeParams& p, int token) const {
    if (!p.causal) return kv_len;
    const int later = q_len - 1 - token;
    return p.cp_tot_seq_lens ? keys_of_rank(p, p.cp_tot_seq_lens[sequence] - later) : kv_len - later;
  }
};

}  // namespace mla
