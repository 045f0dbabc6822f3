// The producer of the row-split mainloop for 16-bit caches: a ring of stages in LDS that four waves fill by direct
// copies, each wave four keys of every tile.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/rope.hpp"
#include "cdna/decode/mfma_16x16x16/kv_row_addresses.hpp"
#include "cdna/decode/mfma_16x16x16/kv_stage_tile.hpp"
#include "common/paged_kv.hpp"
#include "common/problem.hpp"
#include "common/work_tile.hpp"

namespace cdna::mfma_16x16x16 {

template <class Problem, class Policy>
class KvStageProducer {
  using Stage = KvStageTile<Problem>;
  using Rows = FourRows<Problem::latent * 2>;
  using Addresses = KvRowAddresses<Stage::pitch>;
  static constexpr bool has_rope = Problem::rope > 0;
  static constexpr int cos_sin = Stage::residual + Stage::rope_bytes;

 public:
  // A third with cosines and sines would not fit; of narrow rows more keep as many bytes on their way.
  static constexpr int stages = Problem::rotate ? 2 : Problem::latent == 512 ? 3 : Problem::latent == 256 ? 5 : 8;
  static constexpr int prefetch = stages - 1;  // tiles in flight while one is multiplied
  static constexpr int waves = Policy::waves;
  static constexpr int stage_bytes =
      Stage::rope + Stage::rope_bytes + (Problem::rotate ? Stage::rope_bytes + Stage::cos_sin_bytes : 0);
  static constexpr int lds_bytes = stages * stage_bytes + waves * Addresses::bytes;
  static constexpr int copies =
      Rows::instructions + Stage::rope_halves + (Problem::rotate ? FourWords::instructions : 0);  // of a wave per tile
  static constexpr int parts = Rows::instructions + (has_rope ? 1 : 0) + (Problem::rotate ? 1 : 0);  // see copy_part
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
        latent_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + wave * 4 * Stage::pitch),
        rope_at_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds)) + Stage::rope +
                 wave * Stage::wave_rope_bytes) {
    rope_offset_ = lane.group * Stage::pitch + Problem::latent * 2 + rope_word() * 4;
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
#pragma unroll
    for (int j = 0; j < 4; ++j) row_[j] = addresses_.uniform(tile, j);
    Rows::settle(row_);
    tile_ = tile;
    stage_offset_ = stage_offset;
  }
  MLA_DEVICE void copy_part(int n) {
    const auto offset = static_cast<uint32_t>(stage_offset_);
    if (has_rope && n == 0) rope_ = addresses_.of_group(tile_, lane_);  // needed by a later part
    if (n < Rows::instructions) {
      Rows::copy(n, row_, static_cast<uint32_t>(lane_.index * 4), latent_at_ + offset);
    } else if (has_rope && n == Rows::instructions) {
      const char* rope = rope_ + rope_offset_;
      if constexpr (Stage::rope_halves == 2)
        TwoWords::copy(rope, rope + 64, rope_at_ + offset);
      else
        copy_words_to_lds(rope, rope_at_ + offset);
    } else if constexpr (Problem::rotate) {
      const float* cos = rope_cos_sin_ + static_cast<int64_t>(addresses_.key_of_group(tile_, lane_)) * COS_SIN_FLOATS +
                         rope_word() * 2;
      FourWords::copy(cos, cos + 1, cos + FIRST_SINE, cos + FIRST_SINE + 1, cos_sin_at(stage_offset_));
    }
  }

  // Returns when this wave's part of `tile` has landed in its stage and is rotated.
  MLA_DEVICE void wait(int tile, int stage_offset) const {
    wait_vmcnt<copies*(prefetch - 1)>();
    if (prefetch == 2 ? tile + 1 == tiles_ : prefetch > 2 && tile + prefetch > tiles_) wait_vmcnt<0>();
    if constexpr (Problem::rotate) rotate(stage_offset);
  }

  // Stages are named by the offset of their first byte.
  MLA_DEVICE static int next_stage(int stage_offset) {
    return stage_offset == (stages - 1) * stage_bytes ? 0 : stage_offset + stage_bytes;
  }

 private:
  // Returns which 4 of the 64 bytes of a half the lane brings for the key it copies.
  MLA_DEVICE int rope_word() const {
    return (lane_.column / 4 ^ ((4 * wave_ + lane_.group) / 2 % 4)) * 4 + lane_.index % 4;
  }

  MLA_DEVICE uint32_t cos_sin_at(int stage_offset) const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds_) + cos_sin + stage_offset +
                                 wave_ * COS_SIN_FLOATS * 16);
  }

  // Each lane rotates the words it copied, in place.
  MLA_DEVICE void rotate(int stage_offset) const {
    const LdsBytes rope = lds_ + Stage::rope + stage_offset + wave_ * Stage::wave_rope_bytes + lane_.index * 4;
    const LdsBytes cos_sin = (LdsBytes)(uintptr_t)cos_sin_at(stage_offset) + lane_.index * 4;
    const RotatedWords rotated = rotate_words<Policy, typename Problem::Element>(
        lds_read_word(rope), lds_read_word(rope + 256), lds_read_float(cos_sin), lds_read_float(cos_sin + 256),
        lds_read_float(cos_sin + 512), lds_read_float(cos_sin + 768));
    constexpr int residual = Stage::rope_bytes;
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
  // The tile that is being copied:
  const char* row_[4];
  const char* rope_;
  int tile_;
  int stage_offset_;
};

}  // namespace cdna::mfma_16x16x16
