// The producer of the row-split mainloop: a ring of stages in LDS that four waves fill by direct copies, each wave a
// quarter of the keys of every tile, four at a time.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/rope.hpp"
#include "cdna/decode/mfma_16x16x16/kv_row_addresses.hpp"
#include "cdna/decode/mfma_16x16x16/kv_stage_tile.hpp"
#include "common/paged_kv.hpp"
#include "common/problem.hpp"
#include "common/work_tile.hpp"

namespace cdna::mfma_16x16x16 {

template <class Problem, class Policy, int keys = 16>
class KvStageProducer {
  using Stage = KvStageTile<Problem, keys>;
  using Rows = FourRows<Stage::latent_bytes>;
  static constexpr int wave_keys = keys / Policy::waves;
  static constexpr int fours = wave_keys / 4;
  using Addresses = KvRowAddresses<Stage::pitch, wave_keys, Policy::waves>;
  static constexpr bool has_rope = Problem::rope > 0;

 public:
  // A third with cosines and sines would not fit; of narrow rows more keep as many bytes on their way.
  static constexpr int stages = Problem::rotate ? 2 : Problem::latent == 512 ? 3 : Problem::latent == 256 ? 5 : 8;
  static constexpr int prefetch = stages - 1;  // tiles in flight while one is multiplied
  static constexpr int waves = Policy::waves;
  static constexpr int stage_bytes =
      Stage::rope + Stage::rope_bytes + (Problem::rotate ? Stage::cos_sin_bytes : 0);
  static constexpr int lds_bytes = stages * stage_bytes + waves * Addresses::bytes;
  static constexpr int copies =  // of a wave per tile
      fours * (Rows::instructions + Stage::rope_pieces + (Problem::rotate ? FourWords::instructions : 0));
  static constexpr int four_parts = Rows::instructions + (has_rope ? 1 : 0) + (Problem::rotate ? 1 : 0);
  static constexpr int parts = fours * four_parts;  // see copy_part
  static constexpr bool in_parts = true;
  static_assert(!Problem::rotate || fours == 1, "stages: rope parts are rotated four keys to a wave");
  static_assert(copies * prefetch < 63, "stages: more copies in flight than can be counted");

  MLA_DEVICE KvStageProducer(const mla::PagedKv& paged_kv, const mla::WorkTile& tile, const float* rope_cos_sin,
                             int tiles, LdsBytes lds, const Lane& lane, int wave)
      : addresses_(paged_kv, tile.first_key, tile.end_key, lane, wave,
                   lds + stages * stage_bytes + wave * Addresses::bytes),
        lane_(lane),
        lds_(lds),
        wave_(wave),
        tiles_(tiles),
        rope_cos_sin_(rope_cos_sin),
        latent_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + wave * wave_keys * Stage::pitch),
        rope_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + Stage::rope +
                 wave * fours * Stage::four_rope_bytes) {
#pragma unroll
    for (int f = 0; f < fours; ++f)
      rope_offset_[f] = lane.group * Stage::pitch + Stage::latent_bytes + rope_word(f) * 4;
    addresses_.fetch(0);
  }

  // Begins to copy the wave's four rows of a tile into its stage; tiles come in order. Every load of the wave must have
  // arrived before the first call.
  MLA_DEVICE void copy(int tile, int stage_offset) {
    begin_copy(tile, stage_offset);
#pragma unroll
    for (int n = 0; n < parts; ++n) copy_part(n);
  }

  // The same in parts, which the mainloop places between its products.
  MLA_DEVICE void begin_copy(int tile, int stage_offset) {
    addresses_.advance(tile, tiles_);
    find_rows(tile, 0);
    tile_ = tile;
    stage_offset_ = stage_offset;
  }
  MLA_DEVICE void copy_part(int n) {
    const auto offset = static_cast<uint32_t>(stage_offset_);
    const int f = n / four_parts;
    n %= four_parts;
    if (f > 0 && n == 0) find_rows(tile_, f);
    if (has_rope && n == 0) rope_ = addresses_.of_group(tile_, 4 * f, lane_);  // needed by a later part
    if (n < Rows::instructions) {
      Rows::copy(n, row_, static_cast<uint32_t>(lane_.index * 4), latent_at_ + offset + f * 4 * Stage::pitch);
    } else if (has_rope && n == Rows::instructions) {
      const char* rope = rope_ + rope_offset_[f];
      if constexpr (Stage::rope_pieces == 2)
        TwoWords::copy(rope, rope + 64, rope_at_ + offset);
      else
        copy_words_to_lds(rope, rope_at_ + offset + f * Stage::four_rope_bytes);
    } else if constexpr (Problem::rotate) {
      const float* cos = rope_cos_sin_ + static_cast<int64_t>(addresses_.key_of_group(tile_, lane_)) * COS_SIN_FLOATS +
                         rope_word(0) * 2;
      FourWords::copy(cos, cos + 1, cos + FIRST_SINE, cos + FIRST_SINE + 1, cos_sin_at(stage_offset_));
    }
  }

  // Returns when this wave's part of `tile` has landed in its stage and is rotated.
  MLA_DEVICE void wait(int tile, int stage_offset) const {
    if (prefetch > 1 && tile + prefetch > tiles_) wait_vmcnt<0>();
    wait_in_flight(stage_offset);
  }
  // The same where `prefetch` - 1 tiles behind it are in flight.
  MLA_DEVICE void wait_in_flight(int stage_offset) const {
    wait_vmcnt<copies*(prefetch - 1)>();
    if constexpr (Problem::rotate) rotate(stage_offset);
  }

  // Stages are named by the offset of their first byte.
  MLA_DEVICE static int next_stage(int stage_offset) {
    return stage_offset == (stages - 1) * stage_bytes ? 0 : stage_offset + stage_bytes;
  }

 private:
  // Finds the rows of the wave's keys 4 f + 0..3.
  MLA_DEVICE void find_rows(int tile, int f) {
#pragma unroll
    for (int j = 0; j < 4; ++j) row_[j] = addresses_.uniform(tile, 4 * f + j);
    Rows::settle(row_);
  }

  // Returns which 4 of the 64 bytes of a piece the lane brings for the key it copies, 4 f + lane.group of the wave's.
  MLA_DEVICE int rope_word(int f) const {
    return (lane_.column / 4 ^ ((wave_keys * wave_ + 4 * f + lane_.group) / 2 % 4)) * 4 + lane_.index % 4;
  }

  MLA_DEVICE uint32_t cos_sin_at(int stage_offset) const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds_) + Stage::cos_sin + stage_offset +
                                 wave_ * COS_SIN_FLOATS * 16);
  }

  // Each lane rotates the words it copied, in place.
  MLA_DEVICE void rotate(int stage_offset) const {
    const LdsBytes rope = lds_ + Stage::rope + stage_offset + wave_ * Stage::four_rope_bytes + lane_.index * 4;
    const LdsBytes cos_sin = (LdsBytes)(uintptr_t)cos_sin_at(stage_offset) + lane_.index * 4;
    const RotatedWords rotated = rotate_words<Policy, typename Problem::Element>(
        lds_read_word(rope), lds_read_word(rope + 256), lds_read_float(cos_sin), lds_read_float(cos_sin + 256),
        lds_read_float(cos_sin + 512), lds_read_float(cos_sin + 768));
    lds_write_word(rope, rotated.first);
    lds_write_word(rope + 256, rotated.second);
  }

  Addresses addresses_;
  const Lane& lane_;
  LdsBytes lds_;
  int wave_;
  int tiles_;
  const float* rope_cos_sin_;
  uint32_t latent_at_;
  uint32_t rope_at_;
  int rope_offset_[fours];
  // The tile that is being copied:
  const char* row_[4];
  const char* rope_;
  int tile_;
  int stage_offset_;
};

}  // namespace cdna::mfma_16x16x16
