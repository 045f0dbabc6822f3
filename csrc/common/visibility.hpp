// Which keys of a sequence its query tokens see, apart from the causal limit: a sliding window's, as
// ops/plan/window.py has it, and the drafts of a tree.
#pragma once

#include "common/device.hpp"

namespace mla {

// The first key that the first of a sequence's `q_len` query tokens sees, 0 with a negative window_left. A query token
// with `later` ones behind it sees keys from first_key(kv_len, later + 1, window_left) on.
MLA_DEVICE int first_key(int kv_len, int q_len, int window_left) {
  const int earlier = kv_len - q_len;
  return window_left >= 0 && earlier > window_left ? earlier - window_left : 0;
}

// The key from which work tiles and splits of a sequence count, of its first key that is seen. It is a multiple of 64,
// so that blocks of keys keep their place in pages.
MLA_DEVICE int window_origin(int first) { return first / 64 * 64; }

// Which of 32 keys lie behind the first `hidden`, the lowest bit first.
MLA_DEVICE uint32_t window_bits(int hidden) { return hidden <= 0 ? ~0u : hidden < 32 ? ~0u << hidden : 0; }

// Which of 32 keys a query token of a tree sees, the lowest bit first. `word` has a bit for each draft, and the first
// of the keys is draft number `draft`; the keys before draft 0 are seen by all.
MLA_DEVICE uint32_t tree_bits(uint64_t word, int draft) {
  if (draft <= -32) return ~0u;
  if (draft < 0) return static_cast<uint32_t>(word) << -draft | ~(~0u << -draft);
  return draft < 64 ? static_cast<uint32_t>(word >> draft) : 0;
}

}  // namespace mla
