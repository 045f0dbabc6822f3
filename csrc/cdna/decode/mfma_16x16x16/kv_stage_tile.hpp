// A stage of the row-split mainloop: 16 or 32 keys in LDS as they are cached, filled by direct copies.
//
// A stage holds latent rows, 16 bytes more than their length apart, so that eight lanes that read the same column of
// eight keys, and eight that read consecutive columns of one key, both meet all banks once; and every address a lane
// reads is one register plus a constant. Behind them lie the rope parts in pieces of 64 bytes: [four keys][piece][4
// keys][64 bytes], the 16-byte slot s of key k stored at s ^ (k / 2 % 4), for the same reason.
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/rope.hpp"
#include "common/problem.hpp"

namespace cdna::mfma_16x16x16 {

template <class Problem, int keys_ = 16>
struct KvStageTile {
  static constexpr int keys = keys_;
  static constexpr int value_bytes = Problem::Format::bytes;
  static constexpr int latent_bytes = Problem::latent * value_bytes;
  static constexpr int pitch = FourRows<latent_bytes>::pitch;
  static constexpr int rope = keys * pitch;
  static constexpr int rope_pieces = Problem::rope * value_bytes / 64;
  static constexpr int rope_bytes = keys * Problem::rope * value_bytes;
  static constexpr int four_rope_bytes = rope_pieces * 256;  // of four keys
  // For un-rotated keys only: the cosines and sines, [wave][4][64 lanes].
  static constexpr int cos_sin = rope + rope_bytes;
  static constexpr int cos_sin_bytes = keys * COS_SIN_FLOATS * 4;
};

// Offsets at which a lane reads a stage. As the left operand of QK^T it holds 64-byte piece m of key 16 T +
// lane.column; as the left operand of PV, keys 16 T + 4 * lane.group + j, columns 8 * lane.column + 0..7 of 128-column
// block b.
template <class Stage>
struct KvStageReadMap {
  int key, rope, columns;

  MLA_DEVICE explicit KvStageReadMap(const Lane& lane)
      : key(lane.column * Stage::pitch + lane.group * 16),
        rope(Stage::rope + lane.column / 4 * Stage::four_rope_bytes + lane.column % 4 * 64 +
             (lane.group ^ (lane.column / 2 % 4)) * 16),
        columns(4 * lane.group * Stage::pitch + lane.column * 8 * Stage::value_bytes) {}

  // Moves to `tiles` 16-key tiles later.
  MLA_DEVICE void skip(int tiles) {
    key += tiles * 16 * Stage::pitch;
    rope += tiles * 4 * Stage::four_rope_bytes;
    columns += tiles * 16 * Stage::pitch;
  }
  MLA_DEVICE int of_piece(int T, int m) const {
    constexpr int latent_pieces = Stage::latent_bytes / 64;
    if (m < latent_pieces) return key + T * 16 * Stage::pitch + m * 64;
    return rope + T * 4 * Stage::four_rope_bytes + (m - latent_pieces) * 256;
  }
  MLA_DEVICE int of_columns(int T, int b, int j) const {
    return columns + (16 * T + j) * Stage::pitch + b * 128 * Stage::value_bytes;
  }
};

}  // namespace cdna::mfma_16x16x16
