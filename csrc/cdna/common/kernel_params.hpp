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

// What a work tile's parameters are: a copy of all fields that it uses where `together`, else a reference, of which a
// field is loaded where it is needed.
template <bool together, class Params>
struct TileParamsOf {
  using Type = const Params;
};
template <class Params>
struct TileParamsOf<false, Params> {
  using Type = const Params&;
};
template <bool together, class Params>
using TileParams = typename TileParamsOf<together, Params>::Type;

// Returns when all of these values are in scalar registers, so that their loads wait for memory together. The compiler
// puts each load behind the branch that needs it.
template <class... Values>
MLA_DEVICE void loaded(Values... values) {
  ([](auto value) { asm volatile("" : : "s"(value)); }(values), ...);
}

}  // namespace cdna
