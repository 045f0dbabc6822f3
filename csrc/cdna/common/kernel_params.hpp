// The kernel's parameter struct, read again from where the dispatcher put it.
#pragma once

#include "common/device.hpp"

namespace cdna {

// A reference whose loads the compiler cannot merge with earlier ones. Fields that only the beginning and the end of an
// item need would otherwise stay in scalar registers across the main loop, which has none to spare.
// The struct must be the kernel's only argument.
template <class Params>
MLA_DEVICE const Params& reread_params() {
  using Constant = const __attribute__((address_space(4))) Params;
  Constant* at = (Constant*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(at));
  return *(const Params*)at;
}

}  // namespace cdna
