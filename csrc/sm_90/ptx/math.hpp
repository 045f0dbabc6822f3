// Elementary functions by the hardware's approximations, and arithmetic on pairs of bf16.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// 2^x with denormal results, and with these flushed to zero.
MLA_DEVICE float exp2_with_denormals(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Arithmetic each operation of which is rounded and never fused with another.
struct RoundedApart {
  MLA_DEVICE static float product(float a, float b) { return __fmul_rn(a, b); }
  MLA_DEVICE static float difference(float a, float b) { return __fsub_rn(a, b); }
};

// The sum as an atomic addition in global memory rounds it: subnormal numbers count as zeros.
MLA_DEVICE float add_without_subnormals(float a, float b) {
  float y;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

MLA_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same of a normal number whose reciprocal is one.
MLA_DEVICE float reciprocal_of_normal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of both lower halves, and of both upper halves, unsigned.
MLA_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// Multiplies both elements of a register by those of another; a * b + c of both. Each is rounded once.
MLA_DEVICE void scale_fp16x2(uint32_t& a, uint32_t b) { asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); }
MLA_DEVICE void scale_bf16x2(uint32_t& a, uint32_t b) { asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); }
MLA_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

}  // namespace mla::sm_90
