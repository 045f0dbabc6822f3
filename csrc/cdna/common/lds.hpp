// Typed accesses to LDS, and the waits and fences that order them.
#pragma once

#include "cdna/common/types.hpp"

#define MLA_LDS __attribute__((address_space(3)))

namespace cdna {

using LdsBytes = MLA_LDS char*;

// Returns the pointer of an LDS address.
MLA_DEVICE LdsBytes lds_pointer(uint32_t at) { return (LdsBytes)(uintptr_t)at; }

MLA_DEVICE u32x4 lds_read16(LdsBytes at) { return *reinterpret_cast<MLA_LDS u32x4*>(at); }
MLA_DEVICE void lds_write16(LdsBytes at, u32x4 value) { *reinterpret_cast<MLA_LDS u32x4*>(at) = value; }
MLA_DEVICE u32x2 lds_read8(LdsBytes at) { return *reinterpret_cast<MLA_LDS u32x2*>(at); }
MLA_DEVICE void lds_write8(LdsBytes at, u32x2 value) { *reinterpret_cast<MLA_LDS u32x2*>(at) = value; }
MLA_DEVICE f32x4 lds_read_f32x4(LdsBytes at) { return *reinterpret_cast<MLA_LDS f32x4*>(at); }
MLA_DEVICE void lds_write_f32x4(LdsBytes at, f32x4 value) { *reinterpret_cast<MLA_LDS f32x4*>(at) = value; }
MLA_DEVICE uint32_t lds_read_word(LdsBytes at) { return *reinterpret_cast<MLA_LDS uint32_t*>(at); }
MLA_DEVICE void lds_write_word(LdsBytes at, uint32_t value) { *reinterpret_cast<MLA_LDS uint32_t*>(at) = value; }
MLA_DEVICE float lds_read_float(LdsBytes at) { return *reinterpret_cast<MLA_LDS float*>(at); }
MLA_DEVICE void lds_write_float(LdsBytes at, float value) { *reinterpret_cast<MLA_LDS float*>(at) = value; }

// Returns when at most `outstanding` LDS operations of this wave have not finished. The compiler counts them too and
// would wait before each first use; one wait for a group of reads is one instruction instead of one per read.
template <int outstanding>
MLA_DEVICE void wait_lgkmcnt() {
  constexpr int no_other_wait = 0xc07f;  // vmcnt 63, expcnt 7
  __builtin_amdgcn_sched_barrier(0);     // or reads drift behind the wait that counts on them being issued
  __builtin_amdgcn_s_waitcnt(no_other_wait | outstanding << 8);
  __builtin_amdgcn_sched_barrier(0);
}

// Orders LDS accesses of the lanes of one wave. The LDS unit serves a wave in order, so nothing is waited for; the
// fence only keeps the compiler, which sees one lane, from exchanging a write and another lane's read.
MLA_DEVICE void wave_lds_fence() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

}  // namespace cdna
