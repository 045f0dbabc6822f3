// The launch parameters of append_kv: the new rows, the cache, and where and how its layout stores each field.
#pragma once
#include "common/device.hpp"

namespace mla {
struct AppendKvParams {
  const void* kv_c;            // [tokens, latent] of in_type
  const void* k_pe;            // [tokens, rope] of in_type
  uint8_t* kv_cache;           // [pages] blocks of `page` tokens, block_bytes apart
  const void* slot_mapping;    // [tokens] int32, or int64 when wide_slots
  const float* kv_descale;     // [1], or null: 1
  const void* cos_sin;         // [max_len, rope] of angle_type, or null: k_pe is stored as it is
  const void* positions;       // [tokens] int32, or int64 when wide_positions
  int64_t kv_c_stride;         // between tokens of kv_c, in elements, as the next two
  int64_t k_pe_stride;         // between tokens of k_pe
  int64_t cos_sin_stride;      // between positions of cos_sin
  int64_t block_bytes;         // between pages
  int32_t tokens;              // new tokens
  int32_t group;               // tokens of a workgroup
  int32_t slots;               // pages x page
  int32_t page;                // tokens of a page
  uint32_t page_reciprocal;    // ceil(2^(31 + page_shift) / page)
  int32_t page_shift;          // ceil(log2(page))
  int32_t in_type;             // ENCODED_BF16, ENCODED_FP16 or ENCODED_FP32
  int32_t angle_type;          // likewise
  int32_t wide_slots;          // 1: slot_mapping is int64
  int32_t wide_positions;      // 1: positions is int64
  int32_t interleaved;         // 1: pairs (2i, 2i + 1), 0: pairs (i, i + rope / 2)
  int32_t latent;              // values of the latent
  int32_t rope;                // values of the rope part
  int32_t latent_encoding;     // ENCODED_*, of the latent, as the next two
  int32_t rope_encoding;       // of the rope part
  int32_t scale_encoding;      // of the scales
  int32_t tile;                // values that share a scale, or 0
  float divisor;               // scale = max(amax / divisor, smallest), then up to a power of two if asked
  float smallest;              // the least scale
  int32_t power_of_two;        // 1: scales are powers of two
  int32_t latent_offset;       // a field of token t lies at page x per_block + t x stride + offset of its block
  int32_t latent_stride;       // bytes from a token to the next
  int32_t latent_per_block;    // bytes of each token of a page that lie before the field
  int32_t rope_offset;         // as latent_offset
  int32_t rope_stride;         // as latent_stride
  int32_t rope_per_block;      // as latent_per_block
  int32_t scale_offset;        // as latent_offset
  int32_t scale_stride;        // as latent_stride
  int32_t scale_per_block;     // as latent_per_block
  int32_t pad;                 // bytes of zero after the scales
  int32_t pad_offset;          // as latent_offset
  int32_t pad_stride;          // as latent_stride
  int32_t pad_per_block;       // as latent_per_block
};
}  // namespace mla
