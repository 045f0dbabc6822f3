// The end of a wait for another thread or kernel that never does its part: a trap, for which stderr names the file,
// line and function that wait, the block and the thread, and the launch fails with a device-side assert.
//
// SpinLimit counts tries, in a debug build (`python -m mla_suite build --debug`), where MLA_MAX_TRIES is defined; a
// release build waits forever. TimeLimit counts time, in every build: for waits for another kernel, whose loops have
// room for it. Barriers that hardware waits at (`bar.sync`, clusters, griddepcontrol) have no loop that could end.
#pragma once

#include "common/device.hpp"
#include "sm_90/ptx/timer.hpp"

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

// The line that waits.
struct WaitPlace {
  const char* file;
  int line;
  const char* function;
};

// What TimeLimit knows of a wait, packed in 64 bits: the clock at the last look, and the units of 1,024 ns that count.
// Out of line: behind a call the trap costs a wait nothing, in line up to 0.8 % of a call of long splits (PERF.md).
__device__ __noinline__ inline uint64_t look_at_clock(uint64_t state, uint32_t seconds, const char* event,
                                                      WaitPlace place) {
  constexpr uint32_t MOST_NS = 1 << 20;  // from one look to the next
  constexpr uint32_t UNITS_PER_SECOND = 976'563;
  const uint32_t now = global_timer_low(), last = static_cast<uint32_t>(state >> 32);
  uint32_t waited = static_cast<uint32_t>(state);
  if (last != 0) waited += (now - last < MOST_NS ? now - last : MOST_NS) >> 10;
  if (seconds != 0 && waited >= seconds * UNITS_PER_SECOND) {
    __assert_fail(event, place.file, place.line, place.function);
    __builtin_unreachable();  // else registers would be saved around the call
  }
  return static_cast<uint64_t>(now | 1) << 32 | waited;
}

// Measures the time of one wait for another kernel, while this one runs: what passes between two looks at the clock
// counts as a millisecond at most. So the time slices of another process, the stops of a debugger, and most of what a
// sanitizer takes are left out.
class TimeLimit {
 public:
  // `event` says what the wait is for; 0 seconds are no limit.
  MLA_DEVICE TimeLimit(const char* event, int seconds, const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                       const char* function = __builtin_FUNCTION())
      : event_(event), seconds_(seconds), place_{file, line, function} {}

  // Called after a try that failed: returns true, or ends in the trap.
  MLA_DEVICE bool again() {
    constexpr uint32_t TRIES_BETWEEN_LOOKS = 256;  // a fifth of a millisecond
    if (__builtin_expect(++tries_ % TRIES_BETWEEN_LOOKS == 0, 0))
      state_ = look_at_clock(state_, seconds_, event_, place_);
    return true;
  }

 private:
  const char* event_;
  uint32_t seconds_;
  WaitPlace place_;
  uint32_t tries_ = 0;
  uint64_t state_ = 0;
};

}  // namespace mla::sm_90
