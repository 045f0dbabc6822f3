// A choice of bytes from two registers.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// Four bytes: which of those of `low` and `high`, numbered from 0 to 7, the low three bits of each of the selector's
// first four groups of four bits say. Where a group's fourth bit is set, the byte is eight copies of the top bit of that
// byte.
MLA_DEVICE uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

}  // namespace mla::sm_90
