// CUDA's words on a CPU: the threads of one block, or of the blocks of one cluster, are fibers of one CPU thread, and a
// warp's lanes meet where they exchange values. Included before the kernel's sources.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __CUDACC__ 1
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __global__
#define __shared__
#define __align__(bytes)
#define __grid_constant__

using std::max;
using std::min;

struct int4 { int x, y, z, w; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }

#ifndef HOST_BLOCK_THREADS
#define HOST_BLOCK_THREADS 384
#endif
#ifndef HOST_STOPS
#define HOST_STOPS 0  // or one of so many rounds in which blocks arrive at a peer stops one of them
#endif
#ifndef HOST_CLUSTER_X
#define HOST_CLUSTER_X 1
#endif
#ifndef HOST_CLUSTER_Y
#define HOST_CLUSTER_Y 1
#endif
constexpr int BLOCK_THREADS = HOST_BLOCK_THREADS;
constexpr int CLUSTER_X = HOST_CLUSTER_X, CLUSTER_Y = HOST_CLUSTER_Y, CLUSTER_BLOCKS = CLUSTER_X * CLUSTER_Y;
inline int current = 0;        // the thread that runs
inline int current_block = 0;  // its block's number in the cluster, counted along x first
inline int sent_to_peer = -1;  // the block that last arrived at a peer in this round, with HOST_STOPS
inline bool ended_blocks[CLUSTER_BLOCKS] = {};  // whose shared memory is no longer there

// What each block has for itself.
template <class T, int SIZE>
struct OfEachBlock {
  T blocks[CLUSTER_BLOCKS][SIZE] = {};
  T& operator[](int i) { return blocks[current_block][i]; }
};
inline struct { unsigned x, y, z; } blockIdx, gridDim;
struct CurrentThread {
  operator unsigned() const { return current; }
};
inline struct { CurrentThread x; } threadIdx;

void yield();                                 // another thread runs
void yield_until_changed(const long& number);  // others run until it is another number
inline long events = 0;                        // anything that a waiting thread may have waited for
[[noreturn]] inline void fail(const char* what, long number) {
  std::printf("thread %d: %s %ld\n", current, what, number);
  std::exit(2);
}

// How a device-side assert ends: the driver's line on stderr, with the block and the thread.
[[noreturn]] inline void device_assert_fail(const char* assertion, const char* file, unsigned line,
                                            const char* function) {
  std::fprintf(stderr, "%s:%u: %s: block: [%u,%u,%u], thread: [%d,0,0] Assertion `%s` failed.\n", file, line, function,
               blockIdx.x, blockIdx.y, blockIdx.z, current, assertion);
  std::exit(3);
}
#define __assert_fail device_assert_fail

// Threads that exchange one value each; `values` are those of the last meeting.
struct Meeting {
  int count = 0;
  long number = 0;
  uint64_t values[2][128];
};
inline OfEachBlock<Meeting, BLOCK_THREADS / 32> warps;
inline OfEachBlock<Meeting, (BLOCK_THREADS + 127) / 128> warpgroups;

inline const uint64_t* meet(Meeting& meeting, int threads, uint64_t value) {
  const long number = meeting.number;
  meeting.values[number % 2][current % threads] = value;
  if (++meeting.count == threads) {
    meeting.count = 0;
    ++meeting.number;
    ++events;
  } else {
    yield_until_changed(meeting.number);
  }
  return meeting.values[number % 2];
}
inline const uint64_t* meet_warp(uint64_t value) { return meet(warps[current / 32], 32, value); }
inline const uint64_t* meet_warpgroup(uint64_t value) { return meet(warpgroups[current / 128], 128, value); }

inline void __syncwarp() { meet_warp(0); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  std::memcpy(&value, &meet_warp(bits)[lane % 32], sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, current % 32 ^ lanes);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, max(current % 32 - lanes, 0));
}
inline uint32_t __ballot_sync(unsigned, bool is) {
  const uint64_t* lanes = meet_warp(is);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(lanes[lane] != 0) << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool is) { return __ballot_sync(mask, is) != 0; }
inline void __threadfence() {}
inline void meet_all(int& count, long& number, int threads) {
  if (++count == threads) {
    count = 0;
    ++number;
    ++events;
  } else {
    yield_until_changed(number);
  }
}
inline void __syncthreads() {
  static OfEachBlock<int, 1> count;
  static OfEachBlock<long, 1> number;
  meet_all(count[0], number[0], BLOCK_THREADS);
}

template <class T>
T __ldg(const T* from) {
  return *from;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float x) { return std::log2(x); }
inline size_t __cvta_generic_to_shared(const void*) { return 0; }

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// The 16-bit types and e4m3, rounded to nearest even.
inline float bf16_to_float(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  return std::isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float fp16_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? static_cast<float>(fraction) * 0x1p-24f
                                     : bits_to_float((exponent + 112) << 23 | fraction << 13);
  return bits >> 15 ? -size : size;
}
inline uint16_t float_to_fp16(float value) {
  const uint16_t sign = float_to_bits(value) >> 31 << 15;
  if (std::isnan(value)) return 0x7FFF;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7C00;
  if (size < std::ldexp(1.0f, -14)) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  const int fraction = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 2048 carries
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + fraction);
}
inline float e4m3_to_float(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float size = exponent == 15 && fraction == 7 ? NAN
                     : exponent == 0                 ? static_cast<float>(fraction) * 0x1p-9f
                                                     : bits_to_float((exponent + 120) << 23 | fraction << 20);
  return bits >> 7 ? -size : size;
}
