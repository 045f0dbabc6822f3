// Access to the kernel's parameter struct, which is read again instead of being kept in registers.
#pragma once

#include "common/device.hpp"

namespace cdna {

// Returns a reference whose loads the compiler cannot merge with earlier ones. Fields that only the beginning and the
// end of a work tile need would otherwise stay in scalar registers across the mainloop, which has none to spare. The
// struct must be the kernel's only argument.
template <class Params>
MLA_DEVICE const Params& reread_params() {
  using Constant = const __attribute__((address_space(4))) Params;
  Constant* at = (Constant*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(at));
  return *(const Params*)at;
}

}  // namespace cdna
