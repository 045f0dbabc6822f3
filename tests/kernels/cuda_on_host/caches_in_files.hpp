// What programs share that run a kernel of csrc/sm_90 over caches in files.
#pragma once

#include <fstream>
#include <iterator>
#include <string>

#include "block.hpp"

// Words of CUDA that csrc/sm_90/wave.hpp names, for kernels that other programs run.
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int atomicExch(int* word, int value) { return std::exchange(*word, value); }
inline int atomicOr(int* word, int bits) { return std::exchange(*word, *word | bits); }
inline int __reduce_max_sync(unsigned, int x) { return x; }
inline int __reduce_add_sync(unsigned, int x) { return x; }

// A file's bytes, where a GPU's allocator would put them.
inline uint8_t* read(const char* name, size_t& bytes) {
  std::ifstream file(name, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  bytes = text.size();
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(256, (bytes + 256) / 256 * 256));
  std::memcpy(memory, text.data(), bytes);
  return memory;
}
