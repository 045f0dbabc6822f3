// The producer of the row-split mainloop for fp8 caches: rows are copied as they are stored, and each wave converts the
// four keys that it copied into a KvStageTile of bf16 before the barrier, so each value is converted once per
// workgroup.
//
// Two raw buffers per wave are filled ahead and read by their own wave alone; two converted stages are shared.
#pragma once

#include "cdna/common/convert.hpp"
#include "cdna/decode/mfma_16x16x16/kv_row_addresses.hpp"
#include "cdna/decode/mfma_16x16x16/kv_stage_tile.hpp"
#include "cdna/decode/mfma_16x16x16/softmax.hpp"
#include "common/work_tile.hpp"

namespace cdna::mfma_16x16x16 {

template <class Problem, class Policy>
class Fp8StageProducer {
  static_assert(Problem::row_bytes == mla::LATENT + mla::ROPE, "converted stages: rows of 576 fp8 values");
  static constexpr int OUTPUT_BLOCKS = Problem::latent / BLOCK_COLUMNS;
  using Stage = KvStageTile<Problem>;
  using Addresses = KvRowAddresses<FourShortRows::pitch>;
  static constexpr int raw_buffers = 2;

 public:
  static constexpr int stages = 2;
  static constexpr int prefetch = raw_buffers;
  static constexpr int waves = Policy::waves;
  static constexpr int stage_bytes = Stage::rope + Stage::rope_bytes;
  static constexpr int raw = stages * stage_bytes;
  static constexpr int pages = raw + waves * raw_buffers * FourShortRows::bytes;
  static constexpr int lds_bytes = pages + waves * Addresses::bytes;
  static constexpr int copies = FourShortRows::instructions + 1;  // of a wave per tile
  static constexpr int parts = copies;                            // see copy_part

  MLA_DEVICE Fp8StageProducer(const mla::PagedKv& paged_kv, const mla::WorkTile& tile, const float*, int tiles,
                              LdsBytes lds, const Lane& lane, int wave)
      : addresses_(paged_kv, tile.first_key, tile.end_key, lane, wave, lds + pages + wave * Addresses::bytes),
        lane_(lane),
        lds_(lds),
        wave_(wave),
        tiles_(tiles) {
    addresses_.fetch(0);
  }

  // Begins to copy the wave's four rows of a tile into a raw buffer; tiles come in order. Every load of the wave must
  // have arrived before the first call.
  MLA_DEVICE void copy(int tile, int) {
    begin_copy(tile, 0);
#pragma unroll
    for (int n = 0; n < parts; ++n) copy_part(n);
  }

  // The same in parts, which the mainloop places between its products.
  MLA_DEVICE void begin_copy(int tile, int) {
    addresses_.advance(tile, tiles_);
#pragma unroll
    for (int j = 0; j < 4; ++j) row_[j] = addresses_.uniform(tile, j);
    FourShortRows::settle(row_);
    tile_ = tile;
  }
  MLA_DEVICE void copy_part(int n) {
    const auto lds = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(raw_buffer(tile_)));
    if (n == 0) rope_ = addresses_.of_group(tile_, lane_);  // needed by the last part
    if (n < FourShortRows::instructions) {
      FourShortRows::copy(n, row_, static_cast<uint32_t>(lane_.index * 4), lds);
    } else {
      const int offset = lane_.group * FourShortRows::pitch + mla::LATENT + lane_.column * 4;
      FourShortRows::copy_word(rope_ + offset, lds);
    }
  }

  // Returns when this wave's part of `tile` lies converted in its stage.
  MLA_DEVICE void wait(int tile, int stage_offset) const {
    wait_vmcnt<copies*(prefetch - 1)>();
    if (tile + 1 == tiles_) wait_vmcnt<0>();
    convert(tile, stage_offset);
  }

  // Converts the wave's part of a tile that has landed to bf16, into a stage.
  MLA_DEVICE void convert(int tile, int stage_offset) const { convert(raw_buffer(tile), lds_ + stage_offset); }

  // Returns the offset of the bytes that no other wave touches; they are free until the first copy.
  MLA_DEVICE static int private_bytes_of(int wave) { return raw + wave * raw_buffers * FourShortRows::bytes; }

  // Stages are named by the offset of their first byte.
  MLA_DEVICE static int next_stage(int stage_offset) { return stage_bytes - stage_offset; }

 private:
  MLA_DEVICE LdsBytes raw_buffer(int tile) const {
    return lds_ + private_bytes_of(wave_) + tile % raw_buffers * FourShortRows::bytes;
  }

  // A lane converts key 4 * wave + group: eight columns of each 128, and four of the rope part.
  MLA_DEVICE void convert(LdsBytes from, LdsBytes stage) const {
    const LdsBytes row = from + lane_.group * FourShortRows::pitch + lane_.column * 8;
    const LdsBytes to = stage + (4 * wave_ + lane_.group) * Stage::pitch + lane_.column * 16;
    u32x2 eight[OUTPUT_BLOCKS];
#pragma unroll
    for (int b = 0; b < OUTPUT_BLOCKS; ++b) eight[b] = lds_read8(row + b * BLOCK_COLUMNS);
    const uint32_t four = lds_read_word(from + 4 * FourShortRows::pitch + lane_.index * 4);
#pragma unroll
    for (int b = 0; b < OUTPUT_BLOCKS; ++b) lds_write16(to + b * BLOCK_COLUMNS * 2, fp8_to_bf16(eight[b]));
    const int slot = lane_.column % 8 / 2 ^ (4 * wave_ + lane_.group) / 2 % 4;
    lds_write8(stage + Stage::rope + wave_ * 512 + lane_.column / 8 * 256 + lane_.group * 64 + slot * 16 +
                   lane_.column % 2 * 8,
               fp8_to_bf16(four));
  }

  Addresses addresses_;
  const Lane& lane_;
  LdsBytes lds_;
  int wave_;
  int tiles_;
  // The tile that is being copied:
  const char* row_[4];
  const char* rope_;
  int tile_;
};

}  // namespace cdna::mfma_16x16x16
