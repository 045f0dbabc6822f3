// A stage of the row-split mainloop: 16 keys of 16-bit values in LDS, filled by direct copies.
//
// A stage holds 16 latent rows, 16 bytes more than their length apart, so that eight lanes that read the same column of
// eight keys, and eight that read consecutive columns of one key, both meet all banks once; and every address a lane
// reads is one register plus a constant. Behind them, for 576-wide rows, lie the rope parts: [wave][half][4 keys][64
// bytes], the 16-byte slot s of key k stored at s ^ (k / 2 % 4), for the same reason.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/rope.hpp"
#include "common/problem.hpp"

namespace cdna::mfma_16x16x16 {

struct KvStageTile {
  static constexpr int keys = 16;
  static constexpr int pitch = FourRows::pitch;
  static constexpr int rope = keys * pitch;
  static constexpr int rope_bytes = keys * mla::ROPE * 2;
  // For un-rotated keys only: what rounding leaves of the rotated rope parts, laid out like them, then the cosines and
  // sines, [wave][4][64 lanes].
  static constexpr int residual = rope + rope_bytes;
  static constexpr int cos_sin_bytes = keys * COS_SIN_FLOATS * 4;
};

// Offsets at which a lane reads a stage. As the left operand of QK^T it holds 32-column chunk c of key lane.column; as
// the left operand of PV, keys 4 * lane.group + j, columns 8 * lane.column + 0..7 of 128-column block b.
struct KvStageReadMap {
  int key, rope, columns;

  MLA_DEVICE explicit KvStageReadMap(const Lane& lane)
      : key(lane.column * KvStageTile::pitch + lane.group * 16),
        rope(KvStageTile::rope + lane.column / 4 * 512 + lane.column % 4 * 64 +
             (lane.group ^ (lane.column / 2 % 4)) * 16),
        columns(4 * lane.group * KvStageTile::pitch + lane.column * 16) {}
  MLA_DEVICE int of_chunk(int c) const {
    constexpr int latent_chunks = mla::LATENT / 32;
    constexpr int rope_chunks = mla::ROPE / 32;  // a third and a fourth are the residuals
    if (c < latent_chunks) return key + c * 64;
    const int n = c - latent_chunks;
    return rope + n / rope_chunks * KvStageTile::rope_bytes + n % rope_chunks * 256;
  }
  MLA_DEVICE int of_columns(int b, int j) const { return columns + j * KvStageTile::pitch + b * 256; }
};

}  // namespace cdna::mfma_16x16x16
