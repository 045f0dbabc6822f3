// A paged KV cache as convert_kv reads or writes it: where each field of a token lies, in bytes, and how it is scaled.
#pragma once

#include "common/device.hpp"

namespace mla {

// A row is cut into units of 16 values: those of the latent field, then those of the rope field. In a block, token t has
// a field at base + t * stride.
struct KvPlace {
  int64_t block_bytes;         // between pages
  int32_t slots;               // pages x page
  int32_t page;                // tokens of a page
  uint32_t page_reciprocal;    // ceil(2^(31 + page_shift) / page)
  uint32_t page_shift;         // ceil(log2(page))
  int32_t latent_units;        // units of the latent field
  int32_t latent_base;         // of the latent field
  int32_t latent_stride;       // from a token's latent field to the next
  int32_t rope_base;           // of the rope field, whose values are bf16
  int32_t rope_stride;         // from a token's rope field to the next
  int32_t scale_base;          // of the scales
  int32_t scale_stride;        // from a token's scales to the next
  int32_t scale_bytes;         // of a scale: 0 where there are none, 1 or 4
  int32_t scale_words;         // of 4 bytes that hold a token's scales, with the padding behind them
  int32_t scale_shift;         // log2 of the units that share a scale
  int32_t pad;                 // bytes of zero behind the scales, 0 or 1
  float reciprocal;            // 1 / divisor
  float divisor;               // scale = max(amax / divisor, smallest), then up to a power of two if asked
  float smallest;              // the least scale
  int32_t power_of_two;        // 1: scales are powers of two
};

}  // namespace mla
