// A stage of the row-split mainloop: 16 keys of 16-bit values in LDS, filled by direct copies.
//
// A stage holds 16 latent rows, 16 bytes more than their length apart, so that eight lanes that read the same column of
// eight keys, and eight that read consecutive columns of one key, both meet all banks once; and every address a lane
// reads is one register plus a constant. Behind them, for 576-wide rows, lie the rope parts: [wave][half][4 keys][64
// bytes], the 16-byte slot s of key k stored at s ^ (k / 2 % 4), for the same reason. A rope part of 32 values is one
// half.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/rope.hpp"
#include "common/problem.hpp"

namespace cdna::mfma_16x16x16 {

constexpr int STAGE_KEYS = 16;

template <class Problem>
struct KvStageTile {
  static constexpr int keys = STAGE_KEYS;
  static constexpr int pitch = FourRows<Problem::latent * 2>::pitch;
  static constexpr int rope = keys * pitch;
  static constexpr int rope_halves = Problem::rope / 32;
  static constexpr int rope_bytes = keys * Problem::rope * 2;
  static constexpr int wave_rope_bytes = rope_halves * 256;  // of the four keys that a wave copies
  // For un-rotated keys only: what rounding leaves of the rotated rope parts, laid out like them, then the cosines and
  // sines, [wave][4][64 lanes].
  static constexpr int residual = rope + rope_bytes;
  static constexpr int cos_sin_bytes = keys * COS_SIN_FLOATS * 4;
};

// Offsets at which a lane reads a stage. As the left operand of QK^T it holds 32-column chunk c of key lane.column; as
// the left operand of PV, keys 4 * lane.group + j, columns 8 * lane.column + 0..7 of 128-column block b.
template <class Problem>
struct KvStageReadMap {
  using Stage = KvStageTile<Problem>;
  int key, rope, columns;

  MLA_DEVICE explicit KvStageReadMap(const Lane& lane)
      : key(lane.column * Stage::pitch + lane.group * 16),
        rope(Stage::rope + lane.column / 4 * Stage::wave_rope_bytes + lane.column % 4 * 64 +
             (lane.group ^ (lane.column / 2 % 4)) * 16),
        columns(4 * lane.group * Stage::pitch + lane.column * 16) {}
  MLA_DEVICE int of_chunk(int c) const {
    constexpr int latent_chunks = Problem::latent / 32;
    constexpr int rope_chunks = Stage::rope_halves > 0 ? Stage::rope_halves : 1;  // behind them are the residuals
    if (c < latent_chunks) return key + c * 64;
    const int n = c - latent_chunks;
    return rope + n / rope_chunks * Stage::rope_bytes + n % rope_chunks * 256;
  }
  MLA_DEVICE int of_columns(int b, int j) const { return columns + j * Stage::pitch + b * 256; }
};

}  // namespace cdna::mfma_16x16x16
