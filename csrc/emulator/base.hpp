// Types, a growable array and bit casts, since the core uses no C++ standard library.
// The core links libc, libm and libpthread only, so that one compiler wheel builds it in a second.
#pragma once
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace emulator {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 64;
constexpr int VECTORS = 512;  // v0..v255, then the accumulation registers a0..a255
constexpr int SCALARS = 128;  // s0..s105, vcc at 106, m0 at 124, exec at 126
constexpr int VCC = 106, M0 = 124, EXEC = 126;
constexpr u64 ALL_LANES = ~0ull;

enum Arch { GFX942 = 1, GFX950 = 2, ANY_ARCH = 3 };

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Grows by doubling; elements are plain data. Zero-filled memory is a valid empty list.
template <class T>
struct List {
  T* items;
  u32 size, capacity;
  T& operator[](u32 i) { return items[i]; }
  const T& operator[](u32 i) const { return items[i]; }
  void insert(u32 at, const T& value) {
    if (size == capacity) {
      capacity = capacity ? 2 * capacity : 8;
      items = static_cast<T*>(realloc(items, sizeof(T) * capacity));
    }
    memmove(items + at + 1, items + at, sizeof(T) * (size - at));
    items[at] = value;
    size++;
  }
  void push(const T& value) { insert(size, value); }
  void release() {
    free(items);
    items = nullptr;
    size = capacity = 0;
  }
};

template <class T>
inline T* allocate(u64 count) {
  return static_cast<T*>(calloc(count ? count : 1, sizeof(T)));
}

inline int first_lane(u64 mask) { return mask ? __builtin_ctzll(mask) : 0; }

// Visits the set bits of a lane mask; the full mask is the common case and a plain loop.
template <class F>
inline void for_lanes(u64 mask, F&& visit) {
  if (mask == ALL_LANES) {
    for (int lane = 0; lane < LANES; lane++) visit(lane);
  } else {
    for (u64 rest = mask; rest; rest &= rest - 1) visit(__builtin_ctzll(rest));
  }
}

}  // namespace emulator
