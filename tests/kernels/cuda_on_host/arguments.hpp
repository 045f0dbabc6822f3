// The parts that programs running a decode kernel on a CPU share: how they make its arguments.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

// Memory of `count` values that ends where none can be read.
template <class T>
T* before_a_fence(size_t count) {
  constexpr size_t PAGE = 4096;
  const size_t bytes = count * sizeof(T), used = (bytes + PAGE - 1) / PAGE * PAGE;
  char* begin = static_cast<char*>(
      mmap(nullptr, used + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(begin + used, PAGE, PROT_NONE);
  return reinterpret_cast<T*>(begin + used - bytes);
}

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
