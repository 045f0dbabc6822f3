// Accesses of shared memory in pieces that memory.hpp does not have: 8 bytes, and transposed matrices.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

MLA_DEVICE void ld_shared_v2(uint32_t from, uint32_t (&to)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements transposed: each lane gives the address of one 16-byte row, whose eight
// elements come from the eight rows that the registers hold.
MLA_DEVICE void stmatrix_trans_x4(uint32_t to, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace mla::sm_90
