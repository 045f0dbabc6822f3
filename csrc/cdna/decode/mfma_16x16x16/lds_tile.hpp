// A tile of 16 keys x 512, 256 or 128 latent columns (16-bit) in LDS that one wave writes and reads without bank conflicts.
//
// Row strides are multiples of 128 bytes, so unswizzled rows would all begin in the same bank. A row is divided into
// slots of 16 bytes, and slot s of key k is stored at s ^ (k % 8). Then
//   an access by key      eight lanes of eight keys, same slot: eight different slots of a 128-byte line
//   an access by column   eight lanes of one key, consecutive slots: a permutation of one 128-byte line
#pragma once

#include "cdna/common/lds.hpp"

namespace cdna::mfma_16x16x16 {

template <int latent>
struct LatentLdsTile {
  static constexpr int keys = 16;
  static constexpr int row_bytes = latent * 2;
  static constexpr int bytes = keys * row_bytes;
  static constexpr int slot_bytes = 16;

  MLA_DEVICE static int slot_offset(int key, int slot) { return key * row_bytes + (slot ^ (key & 7)) * slot_bytes; }
};

// Offsets at which a lane writes the key lane.column: chunk c is its columns 32 c + 8 * lane.group + 0..7.
template <class Tile>
struct ChunkLdsMap {
  int even, odd;  // chunks 2n and 2n + 1 lie 128 n bytes further

  MLA_DEVICE explicit ChunkLdsMap(const Lane& lane)
      : even(Tile::slot_offset(lane.column, lane.group)),
        odd(Tile::slot_offset(lane.column, 4 + lane.group)) {}
  MLA_DEVICE int of(int chunk) const { return (chunk & 1 ? odd : even) + (chunk >> 1) * 128; }
};

// The same for lanes that hold 16 columns at once: chunks 2 n and 2 n + 1 are columns 64 n + 16 * lane.group + 0..15.
template <class Tile>
struct PairedChunkLdsMap {
  int first, second;

  MLA_DEVICE explicit PairedChunkLdsMap(const Lane& lane)
      : first(Tile::slot_offset(lane.column, 2 * lane.group)),
        second(Tile::slot_offset(lane.column, 2 * lane.group + 1)) {}
  MLA_DEVICE int of(int chunk) const { return (chunk & 1 ? second : first) + (chunk >> 1) * 128; }
};

// The map for lanes whose load brings one chunk or two.
template <class Tile, int chunks_per_load>
struct ChunkLdsMapFor {
  using Map = ChunkLdsMap<Tile>;
};
template <class Tile>
struct ChunkLdsMapFor<Tile, 2> {
  using Map = PairedChunkLdsMap<Tile>;
};

// Offsets at which a lane reads columns: keys 4 * lane.group + 0..3, columns 8 * lane.column + 0..7 of 128-column block
// b.
template <class Tile>
struct ColumnLdsMap {
  int first[4];  // block b lies 256 b bytes further

  MLA_DEVICE explicit ColumnLdsMap(const Lane& lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) first[j] = Tile::slot_offset(4 * lane.group + j, lane.column);
  }
  MLA_DEVICE int of(int block, int j) const { return first[j] + block * 256; }
};

}  // namespace cdna::mfma_16x16x16
