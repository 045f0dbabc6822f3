// Memory to LDS without registers in between, 4 bytes per lane: lane l's word lands at the wave's LDS address + 4 l.
//
// Written as assembly because the compiler orders every later LDS read after all such copies in flight (it cannot tell
// stages of one array apart), which would undo the pipeline. The price: nothing below is known to the compiler's own
// wait and hazard bookkeeping, so
//   - whoever reads the data calls wait_copies first, and a barrier if another wave copied it;
//   - each block begins with the wait states that a scalar register written by v_readlane (5) or M0 (1) needs before a
//     memory instruction reads it;
//   - a count of outstanding copies is only right with no other vector memory instruction in between.
#pragma once

#include "cdna/types.hpp"

namespace cdna {

// Returns when at most `outstanding` vector memory operations of this wave have not finished.
template <int outstanding>
MLA_DEVICE void wait_copies() {
  asm volatile("s_waitcnt vmcnt(%0)" : : "n"(outstanding) : "memory");
}

// One word per lane.
MLA_DEVICE void copy_words(const void* from, uint32_t lds) {
  asm volatile("s_nop 0\n\tglobal_load_lds_dword %0, off" : : "v"(from), "{m0}"(lds) : "memory");
}

// Four rows of 1,024 bytes: row j begins at row[j] + 1024 j (the caller subtracts the 1024 j, so that one M0 serves
// all sixteen instructions: the offset in the instruction counts on both sides). lane_offset[j]: where in each 256 bytes
// of row j the lane's word comes from.
struct FourRows {
  static constexpr int instructions = 16;

  MLA_DEVICE static void copy(const char* const (&row)[4], const uint32_t (&lane_offset)[4], uint32_t lds) {
    asm volatile(
        "s_nop 4\n\t"
        "global_load_lds_dword %0, %4\n\t"
        "global_load_lds_dword %0, %4 offset:256\n\t"
        "global_load_lds_dword %0, %4 offset:512\n\t"
        "global_load_lds_dword %0, %4 offset:768\n\t"
        "global_load_lds_dword %1, %5 offset:1024\n\t"
        "global_load_lds_dword %1, %5 offset:1280\n\t"
        "global_load_lds_dword %1, %5 offset:1536\n\t"
        "global_load_lds_dword %1, %5 offset:1792\n\t"
        "global_load_lds_dword %2, %6 offset:2048\n\t"
        "global_load_lds_dword %2, %6 offset:2304\n\t"
        "global_load_lds_dword %2, %6 offset:2560\n\t"
        "global_load_lds_dword %2, %6 offset:2816\n\t"
        "global_load_lds_dword %3, %7 offset:3072\n\t"
        "global_load_lds_dword %3, %7 offset:3328\n\t"
        "global_load_lds_dword %3, %7 offset:3584\n\t"
        "global_load_lds_dword %3, %7 offset:3840"
        :
        : "v"(lane_offset[0]), "v"(lane_offset[1]), "v"(lane_offset[2]), "v"(lane_offset[3]), "s"(row[0]), "s"(row[1]),
          "s"(row[2]), "s"(row[3]), "{m0}"(lds)
        : "memory");
  }
};

// Two words per lane: `first` to lds + 4 * lane, `second` to lds + 256 + 4 * lane.
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

}  // namespace cdna
