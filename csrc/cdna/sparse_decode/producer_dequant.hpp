// The producer of sparse decode: one wave's part of gathering selected tokens. Indices are read a block of tiles ahead,
// addresses are found for a block at once, rows are loaded a tile ahead and then stored dequantised to LDS, once for
// the workgroup.
#pragma once

#include "cdna/common/cross_lane.hpp"
#include "cdna/common/swizzled_lds_tile.hpp"
#include "cdna/sparse_decode/kv_format.hpp"
#include "common/work_tile.hpp"

namespace cdna::sparse {

// A tile has `keys` keys, of which wave w brings w * wave_keys + 0..wave_keys - 1.
template <class KvFormat, int keys, int waves>
class DequantProducer {
 public:
  using Tile = SwizzledLdsTile<2, KvFormat::qk_dim * 2, keys>;
  static constexpr int wave_keys = keys / waves;
  static constexpr int groups = wave_keys / 8;
  static constexpr int block_tiles = WAVE / wave_keys;  // tiles whose addresses are found at once
  static constexpr int address_bytes = KvFormat::separate_scales ? 16 : 8;
  static constexpr int lds_bytes = WAVE * address_bytes;  // of a wave: the addresses of a block
  static_assert(wave_keys == 8 || wave_keys == 16, "sparse decode: eight or sixteen keys to a wave");

  MLA_DEVICE DequantProducer(const TopkLists& lists, const mla::WorkTile& tile, uint32_t lds, int wave)
      : lists_(lists),
        first_key_(tile.first_key + wave * wave_keys),
        end_key_(tile.end_key),
        wave_(wave),
        lds_(lds),
        write_map_(GatherWriteMap::of<Tile>(GatherLane(static_cast<uint32_t>(Lane::current().index)))) {
    fetch(0);
    enter(0);
    fetch(1);
  }

  // Finds the rows of a tile and begins to load them; tiles come in order.
  MLA_DEVICE void load(int tile) {
    if (tile > 0 && tile % block_tiles == 0) {
      enter(tile / block_tiles);
      fetch(tile / block_tiles + 1);
    }
    const int in_block = tile % block_tiles * wave_keys;
    valid_ = static_cast<uint32_t>(block_valid_ >> in_block) & ((1u << wave_keys) - 1);
    const GatherLane lane(static_cast<uint32_t>(rematerialized(Lane::current().index)));
    uint64_t row[groups], scales[groups];
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const LdsBytes at = lds_pointer(lds_ + (in_block + 8 * g + lane.token) * address_bytes);
      if constexpr (KvFormat::separate_scales) {
        const u32x4 both = lds_read16(at);
        row[g] = join(both[0], both[1]);
        scales[g] = join(both[2], both[3]);
      } else {
        const u32x2 one = lds_read8(at);
        row[g] = join(one[0], one[1]);
        scales[g] = 0;
      }
    }
#pragma unroll
    for (int g = 0; g < groups; ++g) KvFormat::load_half(raw_[g], row[g], lane);
#pragma unroll
    for (int g = 0; g < groups; ++g) KvFormat::load(raw_[g], row[g], scales[g], lane);
  }

  // Stores one of the `pieces` of the loaded rows as bf16, into the tile that begins at `at`.
  static constexpr int pieces = groups * KvFormat::pieces;
  MLA_DEVICE void store(int piece, uint32_t at) const {
    const int g = piece / KvFormat::pieces, eight = wave_ * groups + g;
    KvFormat::store(piece % KvFormat::pieces, raw_[g], at + eight * Tile::group_bytes,
                    write_map_.for_group(static_cast<uint32_t>(eight) % 2));
  }

  // The same in two steps: dequantises one of the pieces in registers, beside products, and writes all of them later.
  // Where nothing is dequantised, the rows stay as they were loaded until then.
  MLA_DEVICE void convert(int piece) {
    if constexpr (KvFormat::is_dequantised) {
      converted_[piece / KvFormat::pieces][piece % KvFormat::pieces] =
          KvFormat::converted(piece % KvFormat::pieces, raw_[piece / KvFormat::pieces]);
    }
  }
  MLA_DEVICE void write_converted(uint32_t at) const {
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const int eight = wave_ * groups + g;
      if constexpr (KvFormat::is_dequantised) {
        KvFormat::write(converted_[g], at + eight * Tile::group_bytes,
                        write_map_.for_group(static_cast<uint32_t>(eight) % 2));
      } else {
#pragma unroll
        for (int i = 0; i < KvFormat::pieces; ++i) store(g * KvFormat::pieces + i, at);
      }
    }
  }

  // Bit k says whether the wave's key k of the tile that was loaded last is valid.
  MLA_DEVICE uint32_t valid() const { return valid_; }

 private:
  MLA_DEVICE static uint64_t join(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

  MLA_DEVICE int key(int block) const {
    const int lane = rematerialized(Lane::current().index);
    return first_key_ + (block * block_tiles + lane / wave_keys) * keys + lane % wave_keys;
  }

  // Begins to read the indices of a block, a key to a lane.
  MLA_DEVICE void fetch(int block) {
    const int mine = key(block);
    index_ = -1;
    if (mine < end_key_) index_ = lists_.index_of(mine);
  }

  // Turns the indices of a block, which have arrived, into addresses in LDS for all lanes of the wave to read.
  MLA_DEVICE void enter(int block) {
    const int lane = rematerialized(Lane::current().index);
    const int mine = key(block);
    const SelectedToken token = lists_.token_of(mine, index_);
    const bool valid = mine < end_key_ && token.valid;
    block_valid_ = __builtin_amdgcn_ballot_w64(valid);
    const uint64_t row = valid ? KvFormat::row_at(token) : zero_token();
    wave_lds_fence();
    const LdsBytes at = lds_pointer(lds_ + lane * address_bytes);
    if constexpr (KvFormat::separate_scales) {
      const uint64_t scales = valid ? KvFormat::scales_at(token) : zero_token();
      lds_write16(at, u32x4{static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), static_cast<uint32_t>(scales),
                            static_cast<uint32_t>(scales >> 32)});
    } else {
      lds_write8(at, u32x2{static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32)});
    }
    wave_lds_fence();
  }

  const TopkLists lists_;
  int first_key_;  // the wave's first key of the work tile
  int end_key_;
  int wave_;
  uint32_t lds_;
  const GatherWriteMap write_map_;
  int index_;             // of the lane's key of the next block
  uint64_t block_valid_;  // bit l: the key of lane l of this block
  uint32_t valid_;
  typename KvFormat::Raw raw_[groups];
  Slots converted_[groups][KvFormat::is_dequantised ? KvFormat::pieces : 1];
};

}  // namespace cdna::sparse
