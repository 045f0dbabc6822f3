// wgmma on a CPU, the first operand in registers or shared memory; wgmma_products.hpp says when it reads them.
#pragma once

#include "sm_90/ptx/convert.hpp"
#include "sm_90/ptx/wgmma_products.hpp"

namespace mla::sm_90 {

inline void wgmma_fence() {}
inline void wgmma_commit() { commit_products(); }
template <int PENDING>
void wgmma_wait() {
  wait_for_products(PENDING);
}
template <int N>
void pin_accumulator(float (&)[N]) {}

template <class T>
void qk_mma(float (&acc)[16], uint64_t a, uint64_t b, bool add) {
  products[current].open.push_back({acc, nullptr, {a, false}, {b, false}, add, 32, execute<T>});
}
template <class T>
void qk_mma(float (&acc)[16], const uint32_t* a, uint64_t b, bool add) {
  products[current].open.push_back({acc, a, {}, {b, false}, add, 32, execute<T>});
}
inline void qk_mma_e4m3(float (&acc)[16], const uint32_t* a, uint64_t b, bool add) {
  products[current].open.push_back({acc, a, {}, {b, false}, add, 32, execute_e4m3});
}
template <class T, int VALUES>
void pv_mma(float (&acc)[VALUES], uint64_t a, uint64_t b, bool add) {
  products[current].open.push_back({acc, nullptr, {a, false}, {b, true}, add, 2 * VALUES, execute<T>});
}

}  // namespace mla::sm_90
