// The vector types of the CDNA instructions, and the position of a lane in its wave.
#pragma once

#include "common/device.hpp"

namespace cdna {

typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef uint32_t u32x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));

constexpr int WAVE = 64;

// The lane map of a 16x16 matrix operand: `column` 0..15 is its row or column, `group` 0..3 its four-element slice of
// the contracted dimension (operands) or its four rows (accumulator).
struct Lane {
  int index;   // 0..63
  int column;  // index % 16
  int group;   // index / 16

  MLA_DEVICE static Lane current();
  MLA_DEVICE static Lane of(int index) { return Lane{index, index & 15, index >> 4}; }
  // Returns this lane as a value the compiler cannot relate to earlier ones, so that nothing derived from it stays in
  // registers for a path that a loop takes rarely.
  MLA_DEVICE Lane rematerialized() const;
};

// Returns x as a new value: results derived from it are computed again here instead of being kept in registers across a
// loop.
MLA_DEVICE int rematerialized(int x) {
  asm volatile("" : "+v"(x));
  return x;
}

// Returns x with everything that the optimiser knows about it forgotten: under -fno-honor-nans it may otherwise drop
// the code that handles NaN.
template <class T>
MLA_DEVICE T opaque(T x) {
  asm("" : "+v"(x));
  return x;
}

// The lane number is counted anew at each call, so that a persistent kernel does not keep it from one work tile to the
// next.
MLA_DEVICE Lane Lane::current() {
  const uint32_t all = static_cast<uint32_t>(cdna::rematerialized(-1));
  return of(static_cast<int>(__builtin_amdgcn_mbcnt_hi(all, __builtin_amdgcn_mbcnt_lo(all, 0))));
}
MLA_DEVICE Lane Lane::rematerialized() const { return of(cdna::rematerialized(index)); }

// Returns the wave's number in its workgroup, which the compiler knows to be the same in all lanes.
MLA_DEVICE int wave_id() { return __builtin_amdgcn_readfirstlane(mla::thread_id() / WAVE); }

}  // namespace cdna
