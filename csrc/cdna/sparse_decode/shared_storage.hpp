// The LDS of a sparse decode workgroup, as byte offsets: the only place where its layout and size are decided.
#pragma once

#include "cdna/sparse_decode/topk_lists.hpp"

namespace cdna::sparse {

template <class Problem, class Partition, class Producer>
struct SharedStorage {
  static constexpr int p_bytes = Problem::row_tiles * (Partition::keys / 32) * 1024;  // P of one tile
  static constexpr int row_bytes = Problem::rows * 4;                                 // a float of every row

  // The stages of keys in bf16 begin at 0.
  static constexpr int p = Partition::stages * Producer::Tile::bytes;                    // [2] P of a tile
  static constexpr int row_addresses = p + 2 * p_bytes;                                  // [wave]
  static constexpr int maxima = row_addresses + Partition::waves * Producer::lds_bytes;  // [key group][row]
  static constexpr int sums = maxima + Partition::key_groups * row_bytes;                // [key group][row]
  static constexpr int alphas = sums + Partition::key_groups * row_bytes;                // [row], of a rescale
  static constexpr int masks = alphas + row_bytes;                                       // [stage] a bit per key
  static constexpr int flags = masks + 16;  // [2] 1 + the tile for which a running max must be raised
  static constexpr int lists = flags + 16;  // the table of the token's pools
  static constexpr int bytes = lists + TopkLists::lds_bytes;
};

}  // namespace cdna::sparse
