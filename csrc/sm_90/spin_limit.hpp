// The end of a wait for another thread or kernel that never does its part. A release build waits forever. In a debug
// build (`python -m mla_suite build --debug`) MLA_MAX_TRIES is defined, and a loop that has tried so often ends in a
// trap: stderr names the file, line and function that wait, the block and the thread, and the launch fails with a
// device-side assert. Barriers that hardware waits at (`bar.sync`, clusters, griddepcontrol) have no loop that could
// end.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// The line that waits: as a default argument, `here()` is that of the caller. Release builds do not keep it.
struct WaitSite {
#if defined(MLA_MAX_TRIES)
  const char* file;
  int line;
  const char* function;
  MLA_DEVICE static constexpr WaitSite here(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                                            const char* function = __builtin_FUNCTION()) {
    return {file, line, function};
  }
#else
  MLA_DEVICE static constexpr WaitSite here() { return {}; }
#endif
};

// Counts the tries of one wait.
class SpinLimit {
 public:
  // `event` says what the wait is for.
#if defined(MLA_MAX_TRIES)
  MLA_DEVICE explicit SpinLimit(const char* event, WaitSite site = WaitSite::here())
      : event_(event), site_(site) {}
#else
  MLA_DEVICE explicit SpinLimit(const char*, WaitSite = WaitSite::here()) {}
#endif

  // Called after a try that failed: returns true, or ends in the trap.
  MLA_DEVICE bool again() {
#if defined(MLA_MAX_TRIES)
    if (++tries_ == MLA_MAX_TRIES) __assert_fail(event_, site_.file, site_.line, site_.function);
#endif
    return true;
  }

 private:
#if defined(MLA_MAX_TRIES)
  const char* event_;
  WaitSite site_;
  int tries_ = 0;
#endif
};

}  // namespace mla::sm_90
