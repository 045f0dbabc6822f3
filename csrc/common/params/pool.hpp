// One pool of a sparse_decode launch: a paged cache, and the keys that each query token selects from it.
#pragma once

#include "common/device.hpp"

namespace mla {

// Strides count elements unless they say bytes. Python packs the four addresses of a pool together, so they come first.
struct Pool {
  const uint8_t* cache;        // [pages, page, token bytes]
  const int32_t* indices;      // [tokens, topk] or [entries]: page number * page + token
  const int32_t* indptr;       // [tokens + 1] of ragged indices, or null: dense ones
  const int32_t* lengths;      // [tokens / tokens_per_length] of dense indices, or null: all topk count
  int64_t page_bytes;          // between pages
  int64_t index_stride;        // between query tokens of dense indices
  int32_t slots;               // pages * page
  int32_t page;                // tokens of a page
  uint32_t page_reciprocal;    // ceil(2^(31 + page_shift) / page): slot / page by one multiplication
  uint32_t page_shift;         // ceil(log2(page))
  int32_t topk;                // indices of a query token, those that select nothing included
  int32_t tokens_per_length;   // query tokens that share an entry of lengths
};

}  // namespace mla
