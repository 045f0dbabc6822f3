// A choice of bytes from two registers, on a CPU.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

inline uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes = __byte_perm(low, high, selector);
  for (int i = 0; i < 4; ++i) {
    if ((selector >> 4 * i & 8) == 0) continue;
    const uint32_t spread = bytes >> (8 * i + 7) & 1 ? 0xFFu : 0u;
    bytes = (bytes & ~(0xFFu << 8 * i)) | spread << 8 * i;
  }
  return bytes;
}

}  // namespace mla::sm_90
