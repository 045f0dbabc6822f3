// Named barriers that also tell all threads something about all of them.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// Waits for THREADS threads at hardware barrier ID; whether `any` is true for one of them.
template <int ID, int THREADS>
MLA_DEVICE bool named_barrier_any(bool any) {
  uint32_t result;
  asm volatile(
      "{\n.reg .pred in, out;\nsetp.ne.b32 in, %1, 0;\nbarrier.cta.red.or.pred out, %2, %3, in;\n"
      "selp.u32 %0, 1, 0, out;\n}\n"
      : "=r"(result)
      : "r"(static_cast<int>(any)), "n"(ID), "n"(THREADS)
      : "memory");
  return result != 0;
}

}  // namespace mla::sm_90
