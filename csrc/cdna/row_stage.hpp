// A ring of three 16-key tiles in LDS that four waves fill by direct copies, each wave four keys of every tile.
//
// A stage holds 16 latent rows, 16 bytes more than their length apart, so that eight lanes that read the same column of
// eight keys, and eight that read consecutive columns of one key, both meet all banks once; and every place a lane
// reads is one address plus a constant. Behind them, for 576-wide rows, the rope parts: [wave][half][4 keys][64 bytes],
// the 16-byte slot s of key k stored at s ^ (k / 2 % 4), for the same reason.
#pragma once

#include "cdna/copy.hpp"
#include "cdna/cross_lane.hpp"
#include "cdna/lds.hpp"
#include "mla/kv_source.hpp"
#include "mla/problem.hpp"

namespace cdna {

struct StagedTile {
  static constexpr int keys = 16;
  static constexpr int pitch = FourRows::pitch;
  static constexpr int rope = keys * pitch;
  static constexpr int rope_bytes = keys * mla::ROPE * 2;
};

// Row addresses of the keys that one wave copies, found for 16 tiles at a time: lane l knows key l % 4 (of the wave's
// four) of tile l / 4. Page numbers come through LDS, one block of tiles ahead.
class RowAddresses {
 public:
  static constexpr int block_tiles = 16;
  static constexpr int bytes = 2 * WAVE * 4;   // page numbers of two blocks, of a wave

  MLA_DEVICE RowAddresses(const mla::KvSource& source, int first_key, int end_key, const Lane& lane, int wave, LdsBytes lds)
      : source_(source), first_(first_key + lane.index / 4 * StagedTile::keys + 4 * wave + lane.index % 4), last_(end_key - 1),
        back_(-(lane.index % 4) * StagedTile::pitch), at_(lds + lane.index * 4),
        lds_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds))) {}

  // Begins to read the page numbers of a block.
  MLA_DEVICE void fetch(int block) const { copy_words(source_.page_entry(key(block)), lds_ + slot(block)); }

  // Page numbers of the block have arrived: the addresses, row j of the wave lowered as FourRows wants it.
  MLA_DEVICE void enter(int block) {
    const uint32_t page = *reinterpret_cast<MLA_LDS uint32_t*>(at_ + slot(block));
    row_ = source_.row(page, key(block)) + back_;
  }

  // For one tile of the entered block: row j of the wave, the same in all lanes.
  MLA_DEVICE const char* uniform(int tile, int j) const { return broadcast(row_, tile % block_tiles * 4 + j); }
  // The row of the wave's key number lane.group.
  MLA_DEVICE const char* of_group(int tile, const Lane& lane) const {
    return lane_value(row_, tile % block_tiles * 4 + lane.group);
  }

 private:
  MLA_DEVICE static int slot(int block) { return block % 2 * WAVE * 4; }
  MLA_DEVICE uint32_t key(int block) const {
    const int key = first_ + block * (block_tiles * StagedTile::keys);
    return static_cast<uint32_t>(key < last_ ? key : last_);
  }

  const mla::KvSource& source_;
  int first_;
  int last_;
  int back_;
  const char* row_;
  LdsBytes at_;
  uint32_t lds_;
};

template <class Problem>
class RowStages {
  static constexpr bool has_rope = Problem::qk_dim > mla::LATENT;

 public:
  static constexpr int stages = 3;
  static constexpr int waves = 4;
  static constexpr int stage_bytes = StagedTile::rope + (has_rope ? StagedTile::rope_bytes : 0);
  static constexpr int bytes = stages * stage_bytes + waves * RowAddresses::bytes;
  static constexpr int copies = FourRows::instructions + (has_rope ? TwoWords::instructions : 0);   // of a wave per tile

  MLA_DEVICE RowStages(const mla::KvSource& source, const mla::WorkItem& item, int tiles, LdsBytes lds, const Lane& lane,
                       int wave)
      : addresses_(source, item.first_key, item.end_key, lane, wave,
                   lds + stages * stage_bytes + wave * RowAddresses::bytes),
        lane_(lane), tiles_(tiles),
        latent_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + wave * 4 * StagedTile::pitch),
        rope_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + StagedTile::rope + wave * 512) {
    const int rope_slot = lane.column / 4 ^ ((4 * wave + lane.group) / 2 % 4);
    rope_offset_ = lane.group * StagedTile::pitch + mla::LATENT * 2 + rope_slot * 16 + lane.index % 4 * 4;
    addresses_.fetch(0);
  }

  // Begins to copy the wave's four rows of a tile into its stage; tiles in order. Before the first, every load of the
  // wave must have arrived.
  MLA_DEVICE void copy(int tile, int stage_at) {
    if (__builtin_expect(tile % RowAddresses::block_tiles == 0, false)) {
      const int block = tile / RowAddresses::block_tiles;
      addresses_.enter(block);
      if (tile + RowAddresses::block_tiles < tiles_) addresses_.fetch(block + 1);
    }
    const char* const rows[4] = {addresses_.uniform(tile, 0), addresses_.uniform(tile, 1), addresses_.uniform(tile, 2),
                                 addresses_.uniform(tile, 3)};
    const char* rope = addresses_.of_group(tile, lane_) + rope_offset_;
    FourRows::copy(rows, static_cast<uint32_t>(lane_.index * 4), latent_at_ + static_cast<uint32_t>(stage_at));
    if (has_rope) TwoWords::copy(rope, rope + 64, rope_at_ + static_cast<uint32_t>(stage_at));
  }

  // Returns when this wave's part of `tile` has landed.
  MLA_DEVICE void wait(int tile) const {
    wait_copies<copies>();
    if (tile + 1 == tiles_) wait_copies<0>();
  }

  // A stage is named by its first byte.
  MLA_DEVICE static int stage_after(int stage_at) {
    return stage_at == (stages - 1) * stage_bytes ? 0 : stage_at + stage_bytes;
  }

 private:
  RowAddresses addresses_;
  const Lane& lane_;
  int tiles_;
  uint32_t latent_at_;
  uint32_t rope_at_;
  int rope_offset_;
};

// A lane's places in a staged tile. As the left operand of the scores it holds 32-column chunk c of key lane.column; of
// the values, keys 4 * lane.group + j, columns 8 * lane.column of 128-column block b.
struct StagedPlaces {
  int key, rope, columns;

  MLA_DEVICE explicit StagedPlaces(const Lane& lane)
      : key(lane.column * StagedTile::pitch + lane.group * 16),
        rope(StagedTile::rope + lane.column / 4 * 512 + lane.column % 4 * 64 + (lane.group ^ (lane.column / 2 % 4)) * 16),
        columns(4 * lane.group * StagedTile::pitch + lane.column * 16) {}
  MLA_DEVICE int of_chunk(int c) const {
    constexpr int latent_chunks = mla::LATENT / 32;
    return c < latent_chunks ? key + c * 64 : rope + (c - latent_chunks) * 256;
  }
  MLA_DEVICE int of_columns(int b, int j) const { return columns + j * StagedTile::pitch + b * 256; }
};

}  // namespace cdna
