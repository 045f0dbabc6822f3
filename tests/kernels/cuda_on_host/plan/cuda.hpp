// CUDA's words for plan on a CPU, declared for its sources and included before them. block.hpp says what exchanges and
// barriers do. The compiler reports every load and store of the sources to accesses.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __CUDACC__ 1
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

// The id of a thread does not change while it runs, nor does its block's.
extern "C" __attribute__((const)) unsigned host_thread();
extern "C" __attribute__((const)) unsigned host_block();
struct ThreadNumber {
  operator unsigned() const { return host_thread(); }
};
struct BlockNumber {
  operator unsigned() const { return host_block(); }
};
constexpr struct {
  ThreadNumber x;
} threadIdx{};
constexpr struct {
  BlockNumber x;
  unsigned y, z;
} blockIdx{};

extern "C" void host_block_barrier();
inline __attribute__((always_inline)) void __syncthreads() { host_block_barrier(); }

// The lanes of a warp meet; each gives a value. All lanes are called for, by a mask of all bits.
extern "C" int host_shuffle(unsigned mask, int value, int source);
extern "C" unsigned host_ballot(unsigned mask, bool condition);
extern "C" int host_largest(unsigned mask, int value);
extern "C" int host_sum(unsigned mask, int value);
inline __attribute__((always_inline)) int __shfl_sync(unsigned mask, int value, int source) {
  return host_shuffle(mask, value, source);
}
inline __attribute__((always_inline)) unsigned __ballot_sync(unsigned mask, bool condition) {
  return host_ballot(mask, condition);
}
inline __attribute__((always_inline)) int __any_sync(unsigned mask, bool condition) {
  return host_ballot(mask, condition) != 0;
}
inline __attribute__((always_inline)) int __reduce_max_sync(unsigned mask, int value) {
  return host_largest(mask, value);
}
inline __attribute__((always_inline)) int __reduce_add_sync(unsigned mask, int value) { return host_sum(mask, value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Words of Wave that plan does not use: a program that does is not linked.
float __shfl_sync(unsigned mask, float value, int source, int width);
float __shfl_xor_sync(unsigned mask, float value, int lanes);
float __fmul_rn(float a, float b);
float __fsub_rn(float a, float b);
int atomicExch(int* word, int value);
int atomicOr(int* word, int bits);
