// How a combine that runs beside decode learns that a partial has arrived: from the partial itself (the Lamport
// scheme).
//
// Before decode lets combine start, it fills its partials with SENTINEL. A word that is anything else is a result. So
// nothing need be ordered, and neither the end of a kernel nor a fence lies between the last store and the merge.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// The bits of a NaN that no arithmetic makes: the hardware's NaN is 0x7fffffff. It holds as long as every stored word
// is the result of a floating-point operation.
constexpr uint32_t SENTINEL = 0xffffffff;

}  // namespace mla::sm_90
