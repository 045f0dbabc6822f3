// A ring of 16-key tiles in LDS that four waves fill by direct copies, each wave four keys of every tile.
//
// A stage holds 16 latent rows, 16 bytes more than their length apart, so that eight lanes that read the same column of
// eight keys, and eight that read consecutive columns of one key, both meet all banks once; and every place a lane
// reads is one address plus a constant. Behind them, for 576-wide rows, the rope parts: [wave][half][4 keys][64 bytes],
// the 16-byte slot s of key k stored at s ^ (k / 2 % 4), for the same reason.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/cross_lane.hpp"
#include "cdna/common/lds.hpp"
#include "cdna/common/rope.hpp"
#include "common/kv_source.hpp"
#include "common/problem.hpp"
#include "common/work_item.hpp"

namespace cdna {

struct KvStageTile {
  static constexpr int keys = 16;
  static constexpr int pitch = FourRows::pitch;
  static constexpr int rope = keys * pitch;
  static constexpr int rope_bytes = keys * mla::ROPE * 2;
  static constexpr int residual = rope + rope_bytes;  // of rotated rope parts, laid out like them
  static constexpr int cos_sin_bytes =
      keys * COS_SIN_FLOATS * 4;  // cosines and sines, [wave][4][64 lanes], if keys come un-rotated
};

// Row addresses of the keys that one wave copies, found for 16 tiles at a time: lane l knows key l % 4 (of the wave's
// four) of tile l / 4. Page numbers come through LDS, one block of tiles ahead. Row j comes lowered by pitch * j, as
// the copies of copy.hpp want it.
template <int pitch>
class KvRowAddresses {
 public:
  static constexpr int block_tiles = 16;
  static constexpr int bytes = 2 * WAVE * 4;  // page numbers of two blocks, of a wave

  MLA_DEVICE KvRowAddresses(const mla::KvSource& source, int first_key, int end_key, const Lane& lane, int wave,
                          LdsBytes lds)
      : source_(source), first_key_(first_key + 4 * wave), last_key_(end_key - 1), lane_(lane.index), lds_(lds) {}

  // Begins to read the page numbers of a block.
  MLA_DEVICE void fetch(int block) const {
    const int lane = rematerialized(lane_);
    copy_words_to_lds(source_.page_entry(key(block, lane)),
               static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds_)) + slot(block));
  }

  // Page numbers of the block have arrived: the addresses.
  MLA_DEVICE void enter(int block) {
    const int lane = rematerialized(lane_);
    const uint32_t page = *reinterpret_cast<MLA_LDS uint32_t*>(lds_ + slot(block) + lane * 4);
    row_ = source_.row(page, key(block, lane)) - lane % 4 * pitch;
  }

  // For one tile of the entered block: row j of the wave, the same in all lanes.
  MLA_DEVICE const char* uniform(int tile, int j) const { return broadcast(row_, tile % block_tiles * 4 + j); }
  // The row of the wave's key number lane.group.
  MLA_DEVICE const char* of_group(int tile, const Lane& lane) const {
    return shuffle(row_, tile % block_tiles * 4 + lane.group);
  }

  MLA_DEVICE int key_of_group(int tile, const Lane& lane) const {
    const int key = first_key_ + tile * KvStageTile::keys + lane.group;
    return key < last_key_ ? key : last_key_;
  }

 private:
  MLA_DEVICE static int slot(int block) { return block % 2 * WAVE * 4; }
  MLA_DEVICE uint32_t key(int block, int lane) const {
    const int key = first_key_ + (block * block_tiles + lane / 4) * KvStageTile::keys + lane % 4;
    return static_cast<uint32_t>(key < last_key_ ? key : last_key_);
  }

  const mla::KvSource& source_;
  int first_key_;  // the wave's first of the item
  int last_key_;   // of the item
  int lane_;
  const char* row_;
  LdsBytes lds_;
};

template <class Policy, class Problem>
class KvStageProducer {
  using Addresses = KvRowAddresses<KvStageTile::pitch>;
  static constexpr bool has_rope = Problem::qk_dim > mla::LATENT;
  static constexpr int cos_sin = KvStageTile::residual + KvStageTile::rope_bytes;

 public:
  static constexpr int stages = Problem::rotate ? 2 : 3;  // a third with cosines and sines would not fit
  static constexpr int ahead = stages - 1;                // tiles in flight while one is multiplied
  static constexpr int waves = Policy::waves;
  static constexpr int stage_bytes = KvStageTile::rope + (has_rope ? KvStageTile::rope_bytes : 0) +
                                     (Problem::rotate ? KvStageTile::rope_bytes + KvStageTile::cos_sin_bytes : 0);
  static constexpr int bytes = stages * stage_bytes + waves * Addresses::bytes;
  static constexpr int copies = FourRows::instructions + (has_rope ? TwoWords::instructions : 0) +
                                (Problem::rotate ? FourWords::instructions : 0);  // of a wave per tile

  MLA_DEVICE KvStageProducer(const mla::KvSource& source, const mla::WorkItem& item, const float* rope_cos_sin, int tiles,
                       LdsBytes lds, const Lane& lane, int wave)
      : addresses_(source, item.first_key, item.end_key, lane, wave,
                   lds + stages * stage_bytes + wave * Addresses::bytes),
        lane_(lane),
        lds_(lds),
        wave_(wave),
        tiles_(tiles),
        rope_cos_sin_(rope_cos_sin),
        latent_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + wave * 4 * KvStageTile::pitch),
        rope_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + KvStageTile::rope + wave * 512) {
    rope_offset_ = lane.group * KvStageTile::pitch + mla::LATENT * 2 + rope_word() * 4;
    addresses_.fetch(0);
  }

  // Begins to copy the wave's four rows of a tile into its stage; tiles in order. Before the first, every load of the
  // wave must have arrived.
  MLA_DEVICE void copy(int tile, int stage_offset) {
    if (__builtin_expect(tile % Addresses::block_tiles == 0, false)) {
      const int block = tile / Addresses::block_tiles;
      addresses_.enter(block);
      if (tile + Addresses::block_tiles < tiles_) addresses_.fetch(block + 1);
    }
    const char* const rows[4] = {addresses_.uniform(tile, 0), addresses_.uniform(tile, 1), addresses_.uniform(tile, 2),
                                 addresses_.uniform(tile, 3)};
    const char* rope = addresses_.of_group(tile, lane_) + rope_offset_;
    FourRows::copy(rows, static_cast<uint32_t>(lane_.index * 4), latent_at_ + static_cast<uint32_t>(stage_offset));
    if constexpr (has_rope) TwoWords::copy(rope, rope + 64, rope_at_ + static_cast<uint32_t>(stage_offset));
    if constexpr (Problem::rotate) {
      const float* cos =
          rope_cos_sin_ + static_cast<int64_t>(addresses_.key_of_group(tile, lane_)) * COS_SIN_FLOATS + rope_word() * 2;
      FourWords::copy(cos, cos + 1, cos + FIRST_SINE, cos + FIRST_SINE + 1, cos_sin_at(stage_offset));
    }
  }

  // Returns when this wave's part of `tile` has landed in its stage, and is rotated.
  MLA_DEVICE void wait(int tile, int stage_offset) const {
    wait_vmcnt<copies*(ahead - 1)>();
    if (ahead > 1 && tile + 1 == tiles_) wait_vmcnt<0>();
    if constexpr (Problem::rotate) rotate(stage_offset);
  }

  // A stage is named by its first byte.
  MLA_DEVICE static int next_stage(int stage_offset) {
    return stage_offset == (stages - 1) * stage_bytes ? 0 : stage_offset + stage_bytes;
  }

 private:
  // Which 4 of the 64 bytes of a half the lane brings for the key it copies.
  MLA_DEVICE int rope_word() const {
    return (lane_.column / 4 ^ ((4 * wave_ + lane_.group) / 2 % 4)) * 4 + lane_.index % 4;
  }

  MLA_DEVICE uint32_t cos_sin_at(int stage_offset) const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds_) + cos_sin + stage_offset + wave_ * COS_SIN_FLOATS * 16);
  }

  // Each lane turns the words it copied, in place.
  MLA_DEVICE void rotate(int stage_offset) const {
    const LdsBytes rope = lds_ + KvStageTile::rope + stage_offset + wave_ * 512 + lane_.index * 4;
    const LdsBytes cos_sin = (LdsBytes)(uintptr_t)cos_sin_at(stage_offset) + lane_.index * 4;
    const RotatedWords rotated = rotate_words<Policy, typename Problem::Element>(
        lds_read_word(rope), lds_read_word(rope + 256), lds_read_float(cos_sin), lds_read_float(cos_sin + 256),
        lds_read_float(cos_sin + 512), lds_read_float(cos_sin + 768));
    constexpr int residual = KvStageTile::rope_bytes;
    lds_write_word(rope, rotated.first);
    lds_write_word(rope + 256, rotated.second);
    lds_write_word(rope + residual, rotated.first_residual);
    lds_write_word(rope + residual + 256, rotated.second_residual);
  }

  Addresses addresses_;
  const Lane& lane_;
  LdsBytes lds_;
  int wave_;
  int tiles_;
  const float* rope_cos_sin_;
  uint32_t latent_at_;
  uint32_t rope_at_;
  int rope_offset_;
};

// A lane's places in a staged tile. As the left operand of the scores it holds 32-column chunk c of key lane.column; of
// the values, keys 4 * lane.group + j, columns 8 * lane.column of 128-column block b.
struct KvStageReadMap {
  int key, rope, columns;

  MLA_DEVICE explicit KvStageReadMap(const Lane& lane)
      : key(lane.column * KvStageTile::pitch + lane.group * 16),
        rope(KvStageTile::rope + lane.column / 4 * 512 + lane.column % 4 * 64 +
             (lane.group ^ (lane.column / 2 % 4)) * 16),
        columns(4 * lane.group * KvStageTile::pitch + lane.column * 16) {}
  MLA_DEVICE int of_chunk(int c) const {
    constexpr int latent_chunks = mla::LATENT / 32;
    constexpr int rope_chunks = mla::ROPE / 32;  // a third and fourth are the rests
    if (c < latent_chunks) return key + c * 64;
    const int n = c - latent_chunks;
    return rope + n / rope_chunks * KvStageTile::rope_bytes + n % rope_chunks * 256;
  }
  MLA_DEVICE int of_columns(int b, int j) const { return columns + j * KvStageTile::pitch + b * 256; }
};

}  // namespace cdna
