// Programmatic dependent launch on a CPU: there is no previous kernel.
#pragma once

namespace mla::sm_90 {

inline void griddep_wait() {}
inline void griddep_launch_dependents() {}

}  // namespace mla::sm_90
