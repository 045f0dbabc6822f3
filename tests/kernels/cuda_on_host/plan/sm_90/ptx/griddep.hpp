// Programmatic dependent launch on a CPU: accesses.hpp checks what a thread does before it has waited.
#pragma once

extern "C" void host_griddep_wait();

namespace mla::sm_90 {

inline void griddep_wait() { host_griddep_wait(); }
inline void griddep_launch_dependents() {}

}  // namespace mla::sm_90
