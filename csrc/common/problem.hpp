// The problem of a decode kernel, apart from how it is computed: element type, query rows of a workgroup, widths.
#pragma once

#include "common/device.hpp"

namespace mla {

constexpr int LATENT = 512;  // values of a cached row that are both key and value, unless a problem says otherwise
constexpr int ROPE = 64;     // values of a cached row that are key only, likewise
constexpr int VALUE_DIM = LATENT;

// One workgroup attends with `rows_` packed query rows (row = query token * heads + head) to one range of keys.
//   Format_    how a cached row is stored (kv_format.hpp)
//   rows_      16 to 128, a multiple of 16
//   qk_dim_    values of a cached row: the latent and the rope part, or the latent alone
//   rotate_    the cached rope part is un-rotated and is rotated by its position as it is loaded
//   latent_    values of the latent
template <class Format_, int rows_, int qk_dim_, bool rotate_, int latent_ = LATENT>
struct DecodeProblem {
  using Format = Format_;
  using Element = typename Format_::Query;
  static constexpr int rows = rows_;
  static constexpr int row_tiles = rows_ / 16;
  static constexpr int qk_dim = qk_dim_;
  static constexpr int latent = latent_;
  static constexpr int rope = qk_dim_ - latent_;
  static constexpr bool rotate = rotate_;
  static constexpr int row_bytes = qk_dim_ * Format_::bytes;
  static_assert(rows_ % 16 == 0 && rows_ >= 16 && rows_ <= 128, "decode: rows must be 16 to 128 in steps of 16");
  static_assert(latent == 512 || latent == 256 || latent == 128, "decode: the latent has 512, 256 or 128 values");
  static_assert(rope == 64 || rope == 32 || rope == 0, "decode: the rope part has 64, 32 or no values");
  static_assert(!rotate_ || qk_dim_ == LATENT + ROPE, "decode: only a 576-wide row has a rope part of its own");
};

}  // namespace mla
