// A tile of keys in LDS for archs with transposed LDS reads and 16-byte copies to LDS.
//
// A copy brings 16 bytes per lane to consecutive addresses, so a tile is built of blocks of 1,024 bytes: 8 keys x 128
// bytes of their rows. Only the choice of the 16-byte slot that a lane fetches is free: slot s of key k is stored at s
// ^ swizzle(k), with
//   swizzle(k) = 2 * (k % 4 ^ k / 4 % 2) + (k / 4 + k / 8) % 2          (fp8 also adds k / 16)
// Then every access meets all banks evenly, whether the LDS serves 128 or 256 bytes a clock:
//   ds_read_b128, one slot of 8 or 16 keys                       all slots of a 128 or 256 byte line
//   ds_read_b64_tr_b16, 32 bytes of 4 keys, or of 8              the same
//   ds_read_b64_tr_b8, 16 bytes of 8 keys, or of 16              the same
// Rows of 576 fp8 values have 64 bytes more than whole blocks: a tail behind the blocks holds them, 16 keys x 64 bytes
// in each 1,024, with slots swizzled likewise.
#pragma once

#include "cdna/common/lds.hpp"
#include "cdna/common/mfma_16x16x32.hpp"

namespace cdna {

// `value_bytes_` is the size of a cached value, 2 or 1; `row_bytes_` is how much of a row the tile holds.
template <int value_bytes_, int row_bytes_, int keys_>
struct SwizzledLdsTile {
  static constexpr int value_bytes = value_bytes_;
  static constexpr int keys = keys_;
  static constexpr int blocks = row_bytes_ / 128;          // of 8 keys
  static constexpr bool has_tail = row_bytes_ % 128 != 0;  // 64 bytes
  static constexpr int group_bytes = blocks * 1024;        // of 8 keys
  static constexpr int tail = keys / 8 * group_bytes;
  static constexpr int bytes = tail + (has_tail ? keys * 64 : 0);
  static_assert(row_bytes_ % 128 == 0 || row_bytes_ % 128 == 64, "swizzled tile: rows of whole 64-byte pieces");
  static_assert(keys % 32 == 0, "swizzled tile: a multiple of 32 keys");

  // Unsigned, so that divisions by powers of two are shifts.
  MLA_DEVICE static uint32_t swizzle(uint32_t key) {
    const uint32_t odd = key / 4 ^ key / 8 ^ (value_bytes == 1 ? key / 16 : 0);
    return 2 * (key % 4 ^ key / 4 % 2) + odd % 2;
  }
  MLA_DEVICE static uint32_t tail_swizzle(uint32_t key) { return key / 4 % 2 * 2 + (key / 2 ^ key / 8) % 2; }

  MLA_DEVICE static uint32_t slot_offset(uint32_t key, uint32_t slot) {
    return key / 8 * group_bytes + slot / 8 * 1024 + key % 8 * 128 + (slot % 8 ^ swizzle(key)) * 16;
  }
  MLA_DEVICE static uint32_t tail_offset(uint32_t key, uint32_t slot) {
    return tail + key / 16 * 1024 + key % 16 * 64 + (slot ^ tail_swizzle(key)) * 16;
  }
};

// Addresses at which a lane reads the left operand of QK^T from the tile that begins at `at`: bytes 64 m + 16 *
// lane.group + 0..15 of the row of key 16 T + lane.column. `at` is a multiple of 1,024, so the swizzle is an exclusive
// or on address bits.
template <class Tile>
struct KeyReadMap {
  uint32_t first, tail;

  MLA_DEVICE explicit KeyReadMap(const Lane& lane)
      : first(Tile::slot_offset(lane.column, lane.group)), tail(Tile::tail_offset(lane.column, lane.group)) {}

  MLA_DEVICE LdsBytes of(uint32_t at, int T, int m) const {
    if (m == 2 * Tile::blocks) return lds_pointer(at + tail + T * 1024);
    const uint32_t swizzled = (at + first) ^ (m % 2 * 64 + (Tile::value_bytes == 1 ? T % 2 * 16 : 0));
    return lds_pointer(swizzled + T * 2 * Tile::group_bytes + m / 2 * 1024);
  }
};

// Reads of the left operand of PV, by transposed reads of 8 bytes: column 16 t + lane.column. A read brings
//   16-bit values    keys 16 n + 4 * lane.group + 0..3
//   fp8 values       keys 32 n + 4 * lane.group + 0..3, then 16 more and the same again
// which are the keys whose P the lane holds.
template <class Tile>
struct ColumnReadMap {
  static constexpr bool narrow = Tile::value_bytes == 1;
  static constexpr int tiles_of_block = 128 / (16 * Tile::value_bytes);
  static constexpr int keys_of_read = narrow ? 32 : 16;
  uint32_t first;

  MLA_DEVICE explicit ColumnReadMap(const Lane& lane) {
    if constexpr (narrow) {
      const int key = lane.column / 8 * 16 + 4 * lane.group + lane.column / 2 % 4;
      first = Tile::slot_offset(key, 0) + lane.column % 2 * 8;
    } else {
      const int key = 4 * lane.group + lane.column / 4;
      first = Tile::slot_offset(key, lane.column % 4 / 2) + lane.column % 2 * 8;
    }
  }
  MLA_DEVICE u32x2 read(uint32_t at, int t, int n) const {
    const uint32_t swizzled = (at + first) ^ (t % tiles_of_block * 16 * Tile::value_bytes);
    const LdsBytes source =
        lds_pointer(swizzled + t / tiles_of_block * 1024 + n * (keys_of_read / 8) * Tile::group_bytes);
    if constexpr (narrow) {
      typedef int i32x2 __attribute__((ext_vector_type(2)));
      return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr8_b64_v2i32((MLA_LDS i32x2*)source));
    } else {
      return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((MLA_LDS s16x4*)source));
    }
  }
};

}  // namespace cdna
