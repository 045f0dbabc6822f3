// A tile of 16 keys x 512, 256 or 128 latent columns in LDS that one wave writes and reads without bank conflicts.
//
// Row strides are multiples of 128 bytes, so unswizzled rows would all begin in the same bank. A row is divided into
// slots of 16 bytes, and slot s of key k is stored at s ^ (k % 8). Then
//   an access by key      eight lanes of eight keys, same slot: eight different slots of a 128-byte line
//   an access by column   eight lanes of one key, consecutive slots: a permutation of one 128-byte line
#pragma once

#include "cdna/common/lds.hpp"

namespace cdna::mfma_16x16x16 {

template <int latent, int value_bytes_>
struct LatentLdsTile {
  static constexpr int keys = 16;
  static constexpr int value_bytes = value_bytes_;
  static constexpr int row_bytes = latent * value_bytes;
  static constexpr int bytes = keys * row_bytes;
  static constexpr int slot_bytes = 16;

  MLA_DEVICE static int slot_offset(int key, int slot) { return key * row_bytes + (slot ^ (key & 7)) * slot_bytes; }
};

// Offsets at which a lane writes the key lane.column: chunk c is its bytes 64 c + 16 * lane.group + 0..15.
template <class Tile>
struct ChunkLdsMap {
  int even, odd;  // chunks 2n and 2n + 1 lie 128 n bytes further

  MLA_DEVICE explicit ChunkLdsMap(const Lane& lane)
      : even(Tile::slot_offset(lane.column, lane.group)),
        odd(Tile::slot_offset(lane.column, 4 + lane.group)) {}
  MLA_DEVICE int of(int chunk) const { return (chunk & 1 ? odd : even) + (chunk >> 1) * 128; }
};

// Offsets at which a lane reads columns: keys 4 * lane.group + 0..3, columns 8 * lane.column + 0..7 of 128-column block
// b.
template <class Tile>
struct ColumnLdsMap {
  int first[4];

  MLA_DEVICE explicit ColumnLdsMap(const Lane& lane) {
    const int at = lane.column * 8 * Tile::value_bytes;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      first[j] = Tile::slot_offset(4 * lane.group + j, at / Tile::slot_bytes) + at % Tile::slot_bytes;
  }
  MLA_DEVICE int of(int block, int j) const { return first[j] + block * 128 * Tile::value_bytes; }
};

}  // namespace cdna::mfma_16x16x16
