// The KV formats of selected tokens. Tokens of a format that must be dequantised lie in raw stages of shared memory as
// they are stored, four to a stage: [4][512] bytes, then four tails of TAIL bytes each. A warp has RAW_STAGES of them.
#pragma once

#include "common/params/sparse_decode_tma.hpp"

namespace mla::sm_90 {

class TopkLists;    // topk_lists.hpp
class StagedLists;  // staged_lists.hpp

// The token that an index names.
struct SelectedToken {
  const uint8_t* page;  // where its page begins
  uint32_t in_page;
  uint32_t page_size;  // tokens of the page
  bool present;        // the index lies in the pool
  int pool;
};

// What formats that must be dequantised have in common.
struct QuantisedFormat {
  static constexpr int HEAD_DIM_V = 512;
  static constexpr bool NEEDS_DEQUANT = true;
  static constexpr bool HAS_SCALES = true;  // tokens have them; else scores and results take one for all pools
  static constexpr bool ANY_V41 = false;  // pools of a launch hold 528 or 288 bytes a token, each its own
  using Lists = TopkLists;
  static constexpr int STAGES = 4;
  static constexpr int RAW_STAGES = 4;
};

// Those whose tokens have their scales in themselves.
template <int TOKEN_BYTES_>
struct ScalesInside : QuantisedFormat {
  static constexpr bool SCALES_APART = false;
  static constexpr bool ARBITRARY_SCALE = true;  // a scale is any fp32 number
  static constexpr int TOKEN_BYTES = TOKEN_BYTES_;
  MLA_DEVICE static uint64_t row_at(const SparseDecodeTmaParams&, const SelectedToken& token) {
    return token.in_page * static_cast<uint64_t>(TOKEN_BYTES_);
  }
};

// 656 bytes: 512 e4m3 values, four fp32 scales of 128 values each, 64 bf16 values.
struct v32 : ScalesInside<656> {
  static constexpr int HEAD_DIM_QK = 576;
  static constexpr int LATENT = 512;       // e4m3 values
  static constexpr int TAIL = 144;         // scales and bf16 values
  static constexpr int TAIL_PIECES = 9;    // of 16 bytes, that come with the token
};

// 528 bytes: the same without bf16 values.
struct v32nope : ScalesInside<528> {
  static constexpr int HEAD_DIM_QK = 512;
  static constexpr int LATENT = 512;
  static constexpr int TAIL = 16;
  static constexpr int TAIL_PIECES = 1;
};

// Bare rows: e4m3 values and nothing else.
template <int HEAD_DIM_QK_>
struct Fp8Rows : QuantisedFormat {
  static constexpr bool HAS_SCALES = false;
  static constexpr bool SCALES_APART = false;
  static constexpr int HEAD_DIM_QK = HEAD_DIM_QK_;
  static constexpr int LATENT = 512;
  static constexpr int TOKEN_BYTES = HEAD_DIM_QK;
  static constexpr int TAIL = HEAD_DIM_QK - LATENT;  // values behind the latent
  static constexpr int TAIL_PIECES = TAIL / 16;
  MLA_DEVICE static uint64_t row_at(const SparseDecodeTmaParams&, const SelectedToken& token) {
    return token.in_page * static_cast<uint64_t>(TOKEN_BYTES);
  }
};
using fp8x576 = Fp8Rows<576>;
using fp8x512 = Fp8Rows<512>;

// 576 bytes: 448 e4m3 values, 64 bf16 values. Behind all tokens of a page lie 8 bytes for each: seven E8M0 scales of 64
// values.
struct dsv4 : QuantisedFormat {
  static constexpr int HEAD_DIM_QK = 512;
  static constexpr int LATENT = 448;
  static constexpr int TOKEN_BYTES = 576;
  static constexpr int TAIL = 80;  // the last 32 bf16 values, scales, and 8 bytes unused
  static constexpr int TAIL_PIECES = 4;
  static constexpr int TAIL_SCALES = 64;  // where the scales lie in the tail
  static constexpr bool SCALES_APART = true;
  static constexpr int SCALE_BYTES = 8;   // of a token
  static constexpr int SCALE_VALUES = 64;  // that share a scale
  static constexpr bool ARBITRARY_SCALE = false;  // a scale is a power of two
  MLA_DEVICE static uint64_t row_at(const SparseDecodeTmaParams&, const SelectedToken& token) {
    return token.in_page * static_cast<uint64_t>(TOKEN_BYTES);
  }
  // From a token to its scales, in units of SCALE_BYTES. Never negative: a token lies before its page's scales.
  MLA_DEVICE static uint32_t to_scales(const SparseDecodeTmaParams&, const SelectedToken& token) {
    return token.page_size * (TOKEN_BYTES / 8) - token.in_page * (TOKEN_BYTES / 8 - 1);
  }
};

// 528 bytes: 512 e4m3 values and 16 E8M0 scales of 32 values each. Scales lie behind all tokens of a page, or each
// token's behind it in a pool that params.interleaved names.
struct v41 : QuantisedFormat {
  static constexpr int HEAD_DIM_QK = 512;
  static constexpr int LATENT = 512;
  static constexpr int TAIL = 16;
  static constexpr int TAIL_PIECES = 0;
  static constexpr int TAIL_SCALES = 0;
  static constexpr bool SCALES_APART = true;
  static constexpr int SCALE_BYTES = 16;
  static constexpr int SCALE_VALUES = 32;
  static constexpr bool ARBITRARY_SCALE = false;
  MLA_DEVICE static uint64_t row_at(const SparseDecodeTmaParams& params, const SelectedToken& token) {
    return row_at(params, token, 512, 16);
  }
  MLA_DEVICE static uint32_t to_scales(const SparseDecodeTmaParams& params, const SelectedToken& token) {
    return to_scales(params, token, 512, 16);
  }

 protected:
  // Of tokens with `values` and `scales` bytes of them.
  MLA_DEVICE static uint64_t row_at(const SparseDecodeTmaParams& params, const SelectedToken& token, int values,
                                    int scales) {
    const int apart = values + (params.interleaved >> token.pool & 1) * scales;
    return token.in_page * static_cast<uint64_t>(apart);
  }
  MLA_DEVICE static uint32_t to_scales(const SparseDecodeTmaParams& params, const SelectedToken& token, int values,
                                       int scales) {
    if ((params.interleaved >> token.pool & 1) != 0) return values / SCALE_BYTES;
    return (token.page_size * values - token.in_page * (values - scales)) / SCALE_BYTES;
  }
};

// Pools of v41 and, where params.fp4 names them, of 288 bytes a token: 256 of 512 e2m1 values, the first of two in the
// low half of their byte, and 32 e4m3 scales of 16 values each. These lie in a raw stage as [4][288] bytes.
struct v41any : v41 {
  static constexpr bool ANY_V41 = true;
  using Lists = StagedLists;
  static constexpr int FP4_BYTES = 288;
  static constexpr uint32_t FP4 = 1u << 31;  // of to_scales: the token is of 288 bytes
  MLA_DEVICE static uint64_t row_at(const SparseDecodeTmaParams& params, const SelectedToken& token) {
    return is_fp4(params, token.pool) ? v41::row_at(params, token, 256, 32) : v41::row_at(params, token);
  }
  MLA_DEVICE static uint32_t to_scales(const SparseDecodeTmaParams& params, const SelectedToken& token) {
    return is_fp4(params, token.pool) ? v41::to_scales(params, token, 256, 32) | FP4 : v41::to_scales(params, token);
  }
  MLA_DEVICE static bool is_fp4(const SparseDecodeTmaParams& params, int pool) { return (params.fp4 >> pool & 1) != 0; }
};

// Rows of bf16, multiplied as they are stored; the first HEAD_DIM_V of their values are V. Of narrow rows more stages keep
// as many bytes on their way.
template <int HEAD_DIM_QK_, int HEAD_DIM_V_ = 512, int STAGES_ = 5>
struct Bf16Format {
  static constexpr bool NEEDS_DEQUANT = false;
  static constexpr bool HAS_SCALES = true;  // nothing is scaled
  static constexpr int HEAD_DIM_QK = HEAD_DIM_QK_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int TOKEN_BYTES = HEAD_DIM_QK_ * 2;
  static constexpr int TAIL = 0;
  static constexpr bool SCALES_APART = false;
  static constexpr int STAGES = STAGES_;
  static constexpr int RAW_STAGES = 0;
};
using bf16x576 = Bf16Format<576>;
using bf16x512 = Bf16Format<512>;
using bf16x160 = Bf16Format<160, 128, 14>;

}  // namespace mla::sm_90
