// Where the lse of a query token lies in a caller's tensor, which may be [batch, heads, q_len] or a part of a larger
// one: tokens lie lse_token_stride apart, and lse_batch_stride further after every lse_tokens of them.
#pragma once

#include "common/division.hpp"

namespace mla {

// Elements from p.lse to head 0 of `token`, counted through the batch and below 2^31.
template <class Params>
MLA_DEVICE int64_t lse_of_token(const Params& p, int64_t token) {
  const uint32_t before = divided(static_cast<uint32_t>(token), p.lse_tokens_reciprocal, p.lse_tokens_shift);
  return token * p.lse_token_stride + before * p.lse_batch_stride;
}

}  // namespace mla
