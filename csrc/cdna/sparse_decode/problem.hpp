// Problem of a sparse decode kernel, apart from how: the format of the selected records and the rows of a workgroup.
#pragma once

namespace cdna::sparse {

// One workgroup attends with `rows_` heads of one query token (16 to 128, a multiple of 16) to that token's selected
// keys.
template <class KvFormat_, int rows_>
struct SparseProblem {
  using KvFormat = KvFormat_;  // kv_format.hpp
  static constexpr int rows = rows_;
  static constexpr int row_tiles = rows_ / 16;
  static_assert(rows_ % 16 == 0 && rows_ >= 16 && rows_ <= 128, "sparse decode: rows must be 16 to 128 in steps of 16");
};

}  // namespace cdna::sparse
