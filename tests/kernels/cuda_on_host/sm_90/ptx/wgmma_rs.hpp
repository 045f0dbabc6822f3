// wgmma with few columns on a CPU: the first operand in registers or shared memory, both contiguous along the depth; of
// mma_ss_transposed the first along its rows.
#pragma once

#include "sm_90/ptx/wgmma.hpp"

namespace mla::sm_90 {

template <class T, int REGS>
void mma_rs(float (&acc)[REGS], const uint32_t (&a)[4], uint64_t b, bool add) {
  products[current].open.push_back({acc, a, {}, {b, false}, add, REGS * 2, execute<T>});
}
template <int REGS>
void mma_ss(float (&acc)[REGS], uint64_t a, uint64_t b, bool add) {
  products[current].open.push_back({acc, nullptr, {a, false}, {b, false}, add, REGS * 2, execute<bf16>});
}
template <int REGS>
void mma_ss_transposed(float (&acc)[REGS], uint64_t a, uint64_t b, bool add) {
  products[current].open.push_back({acc, nullptr, {a, true}, {b, false}, add, REGS * 2, execute<bf16>});
}

}  // namespace mla::sm_90
