// e2m1 values times an e4m3 scale as bf16, which holds every such product exactly. NaN in a scale makes all of its values
// NaN; e2m1 has none.
#pragma once

#include "sm_90/decode/convert_fp8.hpp"
#include "sm_90/ptx/select_bytes.hpp"

namespace mla::sm_90 {

// An e4m3 value (OCP), in the low byte, as bf16 in both halves of a register.
MLA_DEVICE uint32_t e4m3_to_bf16x2(uint32_t stored) {
  uint32_t pair, unused, low, high;
  e4m3_to_fp16(stored, pair, unused);
  unpack_fp16_bits(pair, low, high);
  return __byte_perm(low, low, 0x3232);
}

// Eight values, the first in the low four bits. PTX for sm_90 converts no e2m1, so the two bytes of a value's bf16 are
// looked up by its low three bits, in tables of eight bytes, four values at a time.
MLA_DEVICE void e2m1_to_bf16(uint32_t stored, uint32_t (&values)[4]) {
  const uint32_t sizes = stored & 0x77777777u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t upper = select_bytes(0x3F3F3F00u, 0x40404040u, sizes >> i * 16);
    const uint32_t lower = select_bytes(0xC0800000u, 0xC0804000u, sizes >> i * 16);
    // The top bit of a selector spreads the sign of what it selects: 0x80 becomes 0xFF where a value is negative.
    const uint32_t negative = select_bytes(0x80808080u, 0x80808080u, stored >> i * 16) << 1 & 0x80808080u;
    values[2 * i] = __byte_perm(lower, upper | negative, 0x5140);
    values[2 * i + 1] = __byte_perm(lower, upper | negative, 0x7362);
  }
}

// The same times a scale in both halves of a register.
MLA_DEVICE void dequant_e2m1(uint32_t stored, uint32_t scale, uint32_t (&values)[4]) {
  e2m1_to_bf16(stored, values);
#pragma unroll
  for (int i = 0; i < 4; ++i) scale_bf16x2(values[i], scale);
}

}  // namespace mla::sm_90
