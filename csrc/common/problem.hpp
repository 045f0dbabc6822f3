// The problem of a decode kernel, apart from how it is computed: element type, query rows of a workgroup, widths.
#pragma once

#include "common/device.hpp"

namespace mla {

constexpr int LATENT = 512;  // values of a cached row that are both key and value
constexpr int ROPE = 64;     // values of a cached row that are key only
constexpr int VALUE_DIM = LATENT;

// One workgroup attends with `rows_` packed query rows (row = query token * heads + head) to one range of keys.
//   Format_    how a cached row is stored (kv_format.hpp)
//   rows_      16 to 128, a multiple of 16
//   qk_dim_    LATENT + ROPE, or LATENT where the value is the whole row
//   rotate_    the cached rope part is un-rotated and is rotated by its position as it is loaded
template <class Format_, int rows_, int qk_dim_, bool rotate_>
struct DecodeProblem {
  using Format = Format_;
  using Element = typename Format_::Query;
  static constexpr int rows = rows_;
  static constexpr int row_tiles = rows_ / 16;
  static constexpr int qk_dim = qk_dim_;
  static constexpr bool rotate = rotate_;
  static constexpr int row_bytes = qk_dim_ * Format_::bytes;
  static_assert(rows_ % 16 == 0 && rows_ >= 16 && rows_ <= 128, "decode: rows must be 16 to 128 in steps of 16");
  static_assert(qk_dim_ == LATENT + ROPE || qk_dim_ == LATENT, "decode: a cached row has 576 or 512 values");
  static_assert(!rotate_ || qk_dim_ == LATENT + ROPE, "decode: only a 576-wide row has a rope part of its own");
};

}  // namespace mla
