// e4m3 values (OCP) to the 16-bit type that is multiplied; every value, NaN too, is exact in both.
#pragma once

#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/wgmma.hpp"

namespace mla::sm_90 {

// The four stored values of a register as fp16, the first two and the last two: an instruction for each two. Halves of the
// register that are named need no shift.
MLA_DEVICE void e4m3_to_fp16(uint32_t stored, uint32_t& first, uint32_t& last) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(first), "=r"(last)
      : "r"(stored));
}

// The same as bf16: fp32 holds both exactly, and the upper halves of these are the result.
MLA_DEVICE uint32_t fp16_to_bf16(uint32_t pair) {
  uint32_t low, high;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(pair));
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

// One lane's part of a key: 16 values of each block of 64 columns, 64 bytes apart in `from` and BLOCK_BYTES in `to`.
// `wait_to_store` is called when the first reads are on their way, since each waits for the shared memory that wgmma
// uses. More blocks ahead take registers that stores need while they wait for it, too.
template <class Element, int BLOCKS, int BLOCK_BYTES, class Wait>
MLA_DEVICE void convert_row(uint32_t from, uint32_t to, const Wait& wait_to_store) {
  constexpr int AHEAD = 2;  // blocks that are read before they are needed
  uint32_t stored[AHEAD + 1][4];
#pragma unroll
  for (int c = 0; c < AHEAD; ++c) ld_shared_v4(from + c * 64, stored[c]);
  wait_to_store();
#pragma unroll
  for (int c = 0; c < BLOCKS; ++c) {
    if (c + AHEAD < BLOCKS) ld_shared_v4(from + (c + AHEAD) * 64, stored[(c + AHEAD) % (AHEAD + 1)]);
    uint32_t values[8];
    convert_e4m3<Element>(stored[c % (AHEAD + 1)], values);
    st_shared_v4(to + c * BLOCK_BYTES, values[0], values[1], values[2], values[3]);
    st_shared_v4((to ^ 16) + c * BLOCK_BYTES, values[4], values[5], values[6], values[7]);
  }
}

// 16 values of each of BOXES boxes of 32 columns of a query row, 32 bytes apart in `from` and `box` in `to`; zeros
// where `from` is null.
template <class Element, int BOXES>
MLA_DEVICE void convert_q_row(const char* from, uint32_t to, uint32_t box) {
  constexpr int BATCH = 3;  // boxes whose loads are in flight at the same time
#pragma unroll 1
  for (int first = 0; first < BOXES; first += BATCH) {
    uint32_t stored[BATCH][4];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      stored[i][0] = stored[i][1] = stored[i][2] = stored[i][3] = 0;
      if (from != nullptr && first + i < BOXES) ld_global_v4(from + (first + i) * 32, stored[i]);
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
