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
  int64_t kv_c_stride;         // elements, as the next two
  int64_t k_pe_stride;
  int64_t cos_sin_stride;
  int64_t block_bytes;
  int32_t tokens;
  int32_t group;               // tokens of a workgroup
  int32_t slots;               // pages x page
  int32_t page;
  uint32_t page_reciprocal;    // ceil(2^(31 + page_shift) / page)
  int32_t page_shift;
  int32_t in_type;             // ENCODED_BF16, ENCODED_FP16 or ENCODED_FP32
  int32_t angle_type;          // likewise
  int32_t wide_slots;
  int32_t wide_positions;
  int32_t interleaved;         // 1: pairs (2i, 2i + 1), 0: pairs (i, i + rope / 2)
  int32_t latent;              // values
  int32_t rope;
  int32_t latent_encoding;     // ENCODED_*, as the next two
  int32_t rope_encoding;
  int32_t scale_encoding;
  int32_t tile;                // values that share a scale, or 0
  float divisor;               // scale = max(amax / divisor, smallest), then up to a power of two if asked
  float smallest;
  int32_t power_of_two;
  int32_t latent_offset;       // a field of token t lies at page x per_block + t x stride + offset of its block
  int32_t latent_stride;
  int32_t latent_per_block;
  int32_t rope_offset;
  int32_t rope_stride;
  int32_t rope_per_block;
  int32_t scale_offset;
  int32_t scale_stride;
  int32_t scale_per_block;
  int32_t pad;                 // bytes of zero after the scales
  int32_t pad_offset;
  int32_t pad_stride;
  int32_t pad_per_block;
};
}  // namespace mla
