// Copies from memory to LDS without registers in between, 4 bytes per lane: lane l's word lands at the wave's LDS
// address + 4 l.
//
// The copies are assembly because the compiler orders every later LDS read after all copies in flight (it cannot tell
// stages of one array apart), which would undo the pipeline. In return, the compiler's own wait and hazard bookkeeping
// knows nothing of them, so
//   - a reader of the data calls wait_vmcnt first, and a barrier if another wave copied it;
//   - each block, and the first of FourRows' copies, follows the wait states that a scalar register written by
//     v_readlane (5) or M0 (1) needs before a memory instruction reads it;
//   - a count of outstanding copies is only right with no other vector memory instruction in between.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

// Returns when at most `outstanding` vector memory operations of this wave have not finished.
template <int outstanding>
MLA_DEVICE void wait_vmcnt() {
  asm volatile("s_waitcnt vmcnt(%0)" : : "n"(outstanding) : "memory");
}

// Returns when every load of this wave has arrived, which the compiler understands too: without it the first use of a
// register loaded before a loop makes each iteration wait for the copies in flight.
MLA_DEVICE void wait_all_loads() { __builtin_amdgcn_s_waitcnt(0); }

// Copies one word per lane.
MLA_DEVICE void copy_words_to_lds(const void* from, uint32_t lds) {
  asm volatile("s_nop 0\n\tglobal_load_lds_dword %0, off" : : "v"(from), "{m0}"(lds) : "memory");
}

// Copies four rows of whole 256 bytes to LDS rows that lie `pitch` apart, one of `instructions` at a time. Row j begins
// at row[j] + pitch * j: the caller subtracts that, so that one M0 serves all instructions (the offset in an
// instruction counts on both sides).
template <int row_bytes>
struct FourRows {
  static constexpr int of_row = row_bytes / 256;
  static constexpr int instructions = 4 * of_row;
  static constexpr int pitch = row_bytes + 16;

  // Separates what wrote the rows to scalar registers from the copies.
  MLA_DEVICE static void settle(const char* (&row)[4]) {
    asm volatile("s_nop 4" : "+s"(row[0]), "+s"(row[1]), "+s"(row[2]), "+s"(row[3]));
  }
  MLA_DEVICE static void copy(int n, const char* const (&row)[4], uint32_t lane_offset, uint32_t lds) {
    if (n == 0) asm volatile("s_nop 0" : : "{m0}"(lds));
    asm volatile("global_load_lds_dword %0, %1 offset:%2"
                 :
                 : "v"(lane_offset), "s"(row[n / of_row]), "i"(n / of_row * pitch + n % of_row * 256), "{m0}"(lds)
                 : "memory");
  }
};

// Copies two words per lane: `first` to lds + 4 * lane, `second` to lds + 256 + 4 * lane.
struct TwoWords {
  static constexpr int instructions = 2;

  MLA_DEVICE static void copy(const char* first, const char* second, uint32_t lds) {
    asm volatile(
        "s_nop 0\n\t"
        "global_load_lds_dword %0, off\n\t"
        "global_load_lds_dword %1, off offset:256"
        :
        : "v"(first), "v"(second - 256), "{m0}"(lds)
        : "memory");
  }
};

// Copies four words per lane, 256 bytes apart in LDS.
struct FourWords {
  static constexpr int instructions = 4;

  MLA_DEVICE static void copy(const void* first, const void* second, const void* third, const void* fourth,
                              uint32_t lds) {
    asm volatile(
        "s_nop 0\n\t"
        "global_load_lds_dword %0, off\n\t"
        "global_load_lds_dword %1, off offset:256\n\t"
        "global_load_lds_dword %2, off offset:512\n\t"
        "global_load_lds_dword %3, off offset:768"
        :
        : "v"(first), "v"(static_cast<const char*>(second) - 256), "v"(static_cast<const char*>(third) - 512),
          "v"(static_cast<const char*>(fourth) - 768), "{m0}"(lds)
        : "memory");
  }
};

}  // namespace cdna
