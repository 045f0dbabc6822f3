// A CPU has no registers to move.
#pragma once

namespace mla::sm_90 {

template <int REGISTERS>
void setmaxnreg_inc() {}
template <int REGISTERS>
void setmaxnreg_dec() {}

}  // namespace mla::sm_90
