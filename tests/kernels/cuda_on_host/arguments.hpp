// The parts that programs running a decode kernel on a CPU share: how they make its arguments.
#pragma once

#include <cstdint>
#include <cstdlib>

// Memory for `count` values that begins on 1,024 bytes, as TMA and a GPU's allocator have it.
template <class T>
T* aligned(size_t count) {
  return static_cast<T*>(std::aligned_alloc(1024, (count * sizeof(T) + 1023) / 1024 * 1024));
}

// The numbers by which `mla::divided` divides by n (common/division.hpp).
inline void reciprocal(uint32_t n, uint32_t& result, uint32_t& shift) {
  for (shift = 0; 1u << shift < n;) ++shift;
  result = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + n - 1) / n);
}
