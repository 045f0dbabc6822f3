// Programmatic dependent launch. Without such a launch both instructions do nothing.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// Waits until every kernel before this one in the stream is complete and its stores are visible. Nothing that the
// previous kernel wrote may be read before this.
MLA_DEVICE void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allows blocks of the next kernel to be scheduled, once every block of this grid has called it or has ended.
MLA_DEVICE void griddep_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace mla::sm_90
