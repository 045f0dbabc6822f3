// Programmatic dependent launch on a CPU: what the previous kernel stores is there once a thread has waited for it.
#pragma once

namespace mla::sm_90 {

inline long waits = 0;
void end_previous_kernel();

inline void griddep_wait() {
  if (waits++ == 0) end_previous_kernel();
}
inline void griddep_launch_dependents() {}

}  // namespace mla::sm_90
