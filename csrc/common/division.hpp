// Division by a number that the host knows: one multiplication and a shift.
#pragma once

#include "common/device.hpp"

namespace mla {

// number / n, exact below 2^31 with reciprocal = ceil(2^(31 + shift) / n) and shift = ceil(log2(n)).
MLA_DEVICE uint32_t divided(uint32_t number, uint32_t reciprocal, uint32_t shift) {
  return static_cast<uint32_t>(static_cast<uint64_t>(number * 2) * reciprocal >> 32) >> shift;
}

}  // namespace mla
