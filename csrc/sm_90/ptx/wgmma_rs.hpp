// wgmma with its first operand in registers and 16, 32 or 64 columns: acc += a b, 16 deep, both of type T. A lane's four
// registers are its first row's elements 2(l % 4) and the next, the same of its second row, then both rows' 8 further
// on. mma_ss has its first operand in shared memory, contiguous along the depth; mma_ss_transposed
// contiguous along its rows.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

#define MLA_ACC4(i) "+f"(acc[i]), "+f"(acc[(i) + 1]), "+f"(acc[(i) + 2]), "+f"(acc[(i) + 3])
#define MLA_ACC8(i) MLA_ACC4(i), MLA_ACC4((i) + 4)
#define MLA_ACC16(i) MLA_ACC8(i), MLA_ACC8((i) + 8)
#define MLA_ACC32(i) MLA_ACC16(i), MLA_ACC16((i) + 16)
#define MLA_LIST8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MLA_LIST16 MLA_LIST8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MLA_LIST32 MLA_LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"

#define MLA_WGMMA_RS(N, TYPE, REGS, A0, A1, A2, A3, B, P)                                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" MLA_LIST##REGS "}, {%" A0 ",%" A1  \
               ",%" A2 ",%" A3 "}, %" B ", p, 1, 1, 0;\n}\n"                                                          \
               : MLA_ACC##REGS(0)                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))
#define MLA_MMA_RS(N, REGS, A0, A1, A2, A3, B, P)                                                                      \
  template <class T>                                                                                                  \
  MLA_DEVICE void mma_rs(float (&acc)[REGS], const uint32_t (&a)[4], uint64_t b, bool add) {                          \
    if constexpr (T::is_bf16)                                                                                         \
      MLA_WGMMA_RS(N, "bf16", REGS, A0, A1, A2, A3, B, P);                                                            \
    else                                                                                                              \
      MLA_WGMMA_RS(N, "f16", REGS, A0, A1, A2, A3, B, P);                                                             \
  }

MLA_MMA_RS("16", 8, "8", "9", "10", "11", "12", "13")
MLA_MMA_RS("32", 16, "16", "17", "18", "19", "20", "21")
MLA_MMA_RS("64", 32, "32", "33", "34", "35", "36", "37")

#define MLA_MMA_SS(NAME, N, REGS, A, B, P, TRANSPOSE_A)                                                                \
  MLA_DEVICE void NAME(float (&acc)[REGS], uint64_t a, uint64_t b, bool add) {                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" MLA_LIST##REGS "}, %" A ", %" B           \
                 ", p, 1, 1, " TRANSPOSE_A ", 0;\n}\n"                                                               \
                 : MLA_ACC##REGS(0)                                                                                   \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                       \
  }

MLA_MMA_SS(mma_ss, "16", 8, "8", "9", "10", "0")
MLA_MMA_SS(mma_ss, "32", 16, "16", "17", "18", "0")
MLA_MMA_SS(mma_ss_transposed, "16", 8, "8", "9", "10", "1")

#undef MLA_MMA_SS
#undef MLA_MMA_RS
#undef MLA_WGMMA_RS
#undef MLA_ACC4
#undef MLA_ACC8
#undef MLA_ACC16
#undef MLA_ACC32
#undef MLA_LIST8
#undef MLA_LIST16
#undef MLA_LIST32

}  // namespace mla::sm_90
