// Where the compiler keeps what is accumulated.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

// Compilers before LLVM 22 give every product an accumulation register as its result and, where two paths meet, choose
// an ordinary one if either path uses the value otherwise: they then move all of the output at every turn of the loop.
// Seen from the loop, this value is only ever in an accumulation register. LLVM 22 decides by itself, and worse if
// told.
MLA_DEVICE void pin_to_agpr(f32x4& x) {
#if __clang_major__ < 22
  asm volatile("" : "+a"(x));
#endif
}
// The reverse: 128 rows have 256 registers of output and need a few more for scores.
MLA_DEVICE void pin_to_vgpr(f32x4& x) {
#if __clang_major__ < 22
  asm("" : "+v"(x));
#endif
}

}  // namespace cdna
