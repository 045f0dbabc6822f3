// e4m3 values (OCP) to the 16-bit type that is multiplied: as they are, exact in both types, NaN too; or times a scale.
#pragma once

#include "sm_90/ptx/convert.hpp"
#include "sm_90/ptx/math.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

// Two fp16 values that are e4m3 as bf16: fp32 holds both exactly, and the upper halves of these are the result.
MLA_DEVICE uint32_t fp16_to_bf16(uint32_t pair) {
  uint32_t low, high;
  unpack_fp16_bits(pair, low, high);
  return __byte_perm(low, high, 0x7632);
}

// 16 stored values, in order.
template <class Element>
MLA_DEVICE void convert_e4m3(const uint32_t (&stored)[4], uint32_t (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e4m3_to_fp16(stored[i], values[2 * i], values[2 * i + 1]);
    if constexpr (Element::is_bf16) {
      values[2 * i] = fp16_to_bf16(values[2 * i]);
      values[2 * i + 1] = fp16_to_bf16(values[2 * i + 1]);
    }
  }
}

// Converts four stored values, in order, to fp32 by way of fp16, which holds all of them exactly.
MLA_DEVICE void e4m3_four(uint32_t stored, float2 (&values)[2]) {
  uint32_t pairs[2];
  e4m3_to_fp16(stored, pairs[0], pairs[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float pair[2];
    unpack_pair<fp16>(pairs[i], pair);
    values[i] = {pair[0], pair[1]};
  }
}

// 16 stored values times their scale as bf16: NaN stays NaN, and a product that no bf16 holds becomes infinite. With an
// fp32 scale the product is rounded to fp32 and then to bf16.
MLA_DEVICE void dequant_fp32_scale(const uint32_t (&stored)[4], float scale, uint32_t (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pairs[2];
    e4m3_four(stored[i], pairs);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float high = pairs[j].y * scale, low = pairs[j].x * scale;
      values[2 * i + j] = pack_pair<bf16>(low, high);
    }
  }
}

// One lane's part of a key: 16 values of each block of 64 columns, FROM_BYTES apart in `from` and TO_BYTES in `to`.
// `wait_to_store` is called when the first reads are on their way, since each waits for the shared memory that wgmma
// uses. More blocks ahead take registers that stores need while they wait for it, too.
template <class Element, int BLOCKS, int FROM_BYTES, int TO_BYTES, class Wait>
MLA_DEVICE void convert_row(uint32_t from, uint32_t to, const Wait& wait_to_store) {
  constexpr int AHEAD = 2;  // blocks that are read before they are needed
  uint32_t stored[AHEAD + 1][4];
#pragma unroll
  for (int c = 0; c < AHEAD; ++c) ld_shared_v4(from + c * FROM_BYTES, stored[c]);
  wait_to_store();
#pragma unroll
  for (int c = 0; c < BLOCKS; ++c) {
    if (c + AHEAD < BLOCKS) ld_shared_v4(from + (c + AHEAD) * FROM_BYTES, stored[(c + AHEAD) % (AHEAD + 1)]);
    uint32_t values[8];
    convert_e4m3<Element>(stored[c % (AHEAD + 1)], values);
    st_shared_v4(to + c * TO_BYTES, values[0], values[1], values[2], values[3]);
    st_shared_v4((to ^ 16) + c * TO_BYTES, values[4], values[5], values[6], values[7]);
  }
}

// 16 values of each of BOXES boxes of 32 columns of a query row, 32 bytes apart in `from` and `box` in `to`; zeros
// where `from` is null, and behind the `present` boxes that the row has.
template <class Element, int BOXES>
MLA_DEVICE void convert_q_row(const char* from, uint32_t to, uint32_t box, int present) {
  constexpr int BATCH = 3;  // boxes whose loads are in flight at the same time
#pragma unroll 1
  for (int first = 0; first < BOXES; first += BATCH) {
    uint32_t stored[BATCH][4];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      stored[i][0] = stored[i][1] = stored[i][2] = stored[i][3] = 0;
      if (from != nullptr && first + i < present) ld_global_v4(from + (first + i) * 32, stored[i]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (first + i >= BOXES) continue;
      uint32_t values[8];
      convert_e4m3<Element>(stored[i], values);
      const uint32_t at = to + (first + i) * box;
      st_shared_v4(at, values[0], values[1], values[2], values[3]);
      st_shared_v4(at ^ 16, values[4], values[5], values[6], values[7]);
    }
  }
}

}  // namespace mla::sm_90
