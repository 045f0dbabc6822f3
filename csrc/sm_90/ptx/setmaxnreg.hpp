// Moves registers between the warpgroups of a block. Every warp of the calling warpgroup must execute it.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

template <int REGISTERS>
MLA_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
MLA_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace mla::sm_90
