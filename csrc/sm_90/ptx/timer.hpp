// The device's clock.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// The low half of the time in nanoseconds, which all SMs share; it begins anew every 4.3 s.
MLA_DEVICE uint32_t global_timer_low() {
  uint32_t time;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(time));
  return time;
}

}  // namespace mla::sm_90
