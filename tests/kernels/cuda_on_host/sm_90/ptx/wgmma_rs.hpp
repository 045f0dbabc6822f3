// wgmma with the first operand in registers on a CPU: fp16, the second operand contiguous along the depth.
#pragma once

#include "sm_90/ptx/wgmma_products.hpp"

namespace mla::sm_90 {

template <int REGS>
void mma_rs(float (&acc)[REGS], const uint32_t (&a)[4], uint64_t b, bool add) {
  products[current].open.push_back({acc, a, {}, {b, false}, add, REGS * 2, fp16_to_float});
}

}  // namespace mla::sm_90
