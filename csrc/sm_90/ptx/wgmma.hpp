// Warpgroup matrix instructions (wgmma): descriptors, ordering, and the two shapes that decode issues.
//
// A warpgroup is four warps; warp w holds rows 16w to 16w + 15 of the 64-row result. In a result of n columns, lane l
// holds rows l / 4 and l / 4 + 8 of its warp and columns 8i + 2(l % 4) and the next: acc[4i] and acc[4i + 1] belong to
// the first row, acc[4i + 2] and acc[4i + 3] to the second.
#pragma once

#include "common/device.hpp"
#include "sm_90/ptx/convert.hpp"

namespace mla::sm_90 {

// Shared-memory operand descriptor. Offsets are in bytes. What `leading` and `stride` mean depends on the layout:
// - swizzled, contiguous along K (keys of Q K^T): stride leads to the next 8 rows; leading is unused.
// - swizzled, contiguous along N (values of P V): leading leads to the next block of 64 columns, stride to the next
//   8 keys.
// - not swizzled, contiguous along K (P): core matrices of 8 rows x 16 bytes; leading leads to the next core along K,
//   stride to the next along rows.
enum class Swizzle : uint64_t { none = 0, bytes128 = 1, bytes64 = 2 };

MLA_DEVICE uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3FFFFu) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (static_cast<uint64_t>(swizzle) << 62);
}

// The same operand `bytes` further on. The address field never carries out of its 14 bits within 227 KiB.
MLA_DEVICE uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xFFFFFFFF00000000ull) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// Orders earlier register accesses before the next wgmma.
MLA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
MLA_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads or writes of an accumulator across this point.
template <int N>
MLA_DEVICE void pin_accumulator(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

#define MLA_ACC4(a, i) "+f"(a[i]), "+f"(a[(i) + 1]), "+f"(a[(i) + 2]), "+f"(a[(i) + 3])
#define MLA_ACC8(a, i) MLA_ACC4(a, i), MLA_ACC4(a, (i) + 4)
#define MLA_ACC16(a, i) MLA_ACC8(a, i), MLA_ACC8(a, (i) + 8)
#define MLA_ACC32(a, i) MLA_ACC16(a, i), MLA_ACC16(a, (i) + 16)
#define MLA_ACC64(a, i) MLA_ACC32(a, i), MLA_ACC32(a, (i) + 32)

#define MLA_LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MLA_LIST24 MLA_LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MLA_LIST32 MLA_LIST24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define MLA_LIST64                                                                                                    \
  MLA_LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"      \
             "%56,%57,%58,%59,%60,%61,%62,%63"

// acc = (add ? acc : 0) + a b, 16 deep. SS: both operands lie in shared memory; RS: `a` lies in registers.
// b of Q K^T is contiguous along K; b of P V is contiguous along N, which TRANSPOSE_B says.
#define MLA_WGMMA_SS(N, TYPE, LIST, ACC, A, B, P, TRANSPOSE_B)                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "}, %" A ", %" B              \
               ", p, 1, 1, 0, " TRANSPOSE_B ";\n}\n"                                                                  \
               : ACC                                                                                                  \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define MLA_WGMMA_RS(N, TYPE, LIST, ACC, A0, A1, A2, A3, B, P)                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "}, {%" A0 ",%" A1 ",%" A2    \
               ",%" A3 "}, %" B ", p, 1, 1, 0;\n}\n"                                                                  \
               : ACC                                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))

#define MLA_QK_MMA(N, REGS, A, B, P, A1, A2, A3, RB, RP)                                                               \
  template <class T>                                                                                                  \
  MLA_DEVICE void qk_mma(float (&acc)[REGS], uint64_t a, uint64_t b, bool add) {                                  \
    if constexpr (T::is_bf16)                                                                                         \
      MLA_WGMMA_SS(N, "bf16", MLA_LIST##REGS, MLA_ACC##REGS(acc, 0), A, B, P, "0");                                   \
    else                                                                                                              \
      MLA_WGMMA_SS(N, "f16", MLA_LIST##REGS, MLA_ACC##REGS(acc, 0), A, B, P, "0");                                    \
  }                                                                                                                   \
  template <class T>                                                                                                  \
  MLA_DEVICE void qk_mma(float (&acc)[REGS], const uint32_t* a, uint64_t b, bool add) {                           \
    if constexpr (T::is_bf16)                                                                                         \
      MLA_WGMMA_RS(N, "bf16", MLA_LIST##REGS, MLA_ACC##REGS(acc, 0), A, A1, A2, A3, RB, RP);                          \
    else                                                                                                              \
      MLA_WGMMA_RS(N, "f16", MLA_LIST##REGS, MLA_ACC##REGS(acc, 0), A, A1, A2, A3, RB, RP);                           \
  }

// S = Q K^T of 64 rows and 32 keys.
MLA_QK_MMA("32", 16, "16", "17", "18", "17", "18", "19", "20", "21")

// O += P V of 64 rows and 128 or 64 value columns.
template <class T>
MLA_DEVICE void pv_mma(float (&acc)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (T::is_bf16)
    MLA_WGMMA_SS("128", "bf16", MLA_LIST64, MLA_ACC64(acc, 0), "64", "65", "66", "1");
  else
    MLA_WGMMA_SS("128", "f16", MLA_LIST64, MLA_ACC64(acc, 0), "64", "65", "66", "1");
}
template <class T>
MLA_DEVICE void pv_mma(float (&acc)[32], uint64_t a, uint64_t b, bool add) {
  if constexpr (T::is_bf16)
    MLA_WGMMA_SS("64", "bf16", MLA_LIST32, MLA_ACC32(acc, 0), "32", "33", "34", "1");
  else
    MLA_WGMMA_SS("64", "f16", MLA_LIST32, MLA_ACC32(acc, 0), "32", "33", "34", "1");
}

// S = Q K^T of e4m3, 32 deep: a register of `a` has four values, of a row as for 16-bit types, those of columns 4 (l % 4)
// and the next three, and 16 further on. Sums keep fewer bits than fp32 has (csrc/sm_90/decode/PERF.md).
MLA_DEVICE void qk_mma_e4m3(float (&acc)[16], const uint32_t* a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" MLA_LIST16 "}, {%16,%17,%18,%19}, %20, p, 1, 1;"
               "\n}\n"
               : MLA_ACC16(acc, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#undef MLA_QK_MMA
#undef MLA_WGMMA_SS
#undef MLA_WGMMA_RS
#undef MLA_ACC4
#undef MLA_ACC8
#undef MLA_ACC16
#undef MLA_ACC32
#undef MLA_ACC64
#undef MLA_LIST16
#undef MLA_LIST24
#undef MLA_LIST32
#undef MLA_LIST64

}  // namespace mla::sm_90
