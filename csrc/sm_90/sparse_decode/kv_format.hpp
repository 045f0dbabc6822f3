// The KV formats of selected tokens. Tokens of a format that must be dequantised lie in raw stages of shared memory as
// they are stored, four to a stage: [4][512] bytes, then four tails of TAIL bytes each. A warp has RAW_STAGES of them.
#pragma once

namespace mla::sm_90 {

// 656 bytes: 512 e4m3 values, four fp32 scales of 128 values each, 64 bf16 values.
struct v32 {
  static constexpr bool NEEDS_DEQUANT = true;
  static constexpr int HEAD_DIM_QK = 576;
  static constexpr int LATENT = 512;  // e4m3 values
  static constexpr int TOKEN_BYTES = 656;
  static constexpr int TAIL = 144;                    // scales and bf16 values
  static constexpr int TAIL_PIECES = 9;               // of 16 bytes, that come with the token
  static constexpr bool SCALES_APART = false;         // scales lie in the token
  static constexpr bool ARBITRARY_SCALE = true;       // a scale is any fp32 number
  static constexpr int STAGES = 4;
  static constexpr int RAW_STAGES = 4;
};

// 576 bytes: 448 e4m3 values, 64 bf16 values. Behind all tokens of a page lie 8 bytes for each: seven E8M0 scales of 64
// values.
struct dsv4 {
  static constexpr bool NEEDS_DEQUANT = true;
  static constexpr int HEAD_DIM_QK = 512;
  static constexpr int LATENT = 448;
  static constexpr int TOKEN_BYTES = 576;
  static constexpr int TAIL = 80;  // the last 32 bf16 values, scales, and 8 bytes unused
  static constexpr int TAIL_PIECES = 4;
  static constexpr int TAIL_SCALES = 64;  // where the scales lie in the tail
  static constexpr bool SCALES_APART = true;
  static constexpr bool ARBITRARY_SCALE = false;  // a scale is a power of two
  static constexpr int STAGES = 4;
  static constexpr int RAW_STAGES = 4;
};

// Rows of bf16, multiplied as they are stored.
template <int HEAD_DIM_QK_>
struct Bf16Format {
  static constexpr bool NEEDS_DEQUANT = false;
  static constexpr int HEAD_DIM_QK = HEAD_DIM_QK_;
  static constexpr int TOKEN_BYTES = HEAD_DIM_QK_ * 2;
  static constexpr int TAIL = 0;
  static constexpr bool SCALES_APART = false;
  static constexpr int STAGES = 5;
  static constexpr int RAW_STAGES = 0;
};
using bf16x576 = Bf16Format<576>;
using bf16x512 = Bf16Format<512>;

}  // namespace mla::sm_90
