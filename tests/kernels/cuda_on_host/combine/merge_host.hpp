// What the kernels of csrc/sm_90/combine need of CUDA beyond cuda.hpp, and their problems.
#pragma once

#include "block.hpp"
#include "common/params/combine.hpp"

#undef __shared__
#define __shared__ static
#define __launch_bounds__(...)
inline int __reduce_max_sync(unsigned, int value) {
  const uint64_t* lanes = meet_warp(static_cast<uint32_t>(value));
  int largest = value;
  for (int i = 0; i < 32; ++i) largest = max(largest, static_cast<int>(lanes[i]));
  return largest;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width) {
  return __shfl_sync(mask, value, current % 32 / width * width + lane % width);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int atomicOr(int* word, int bits) { return std::exchange(*word, *word | bits); }
inline int atomicExch(int* word, int value) { return std::exchange(*word, value); }

using Words = std::vector<uint32_t>;

inline Words take(std::FILE* file, size_t count) {
  Words words(count);
  if (std::fread(words.data(), 4, count, file) != count) fail("words are missing:", static_cast<long>(count));
  return words;
}
template <class T>
T* at(Words& words) {
  return words.empty() ? nullptr : reinterpret_cast<T*>(words.data());
}

// Of 32-bit words: blocks, words of the parameters without addresses and of all arrays; then the parameters and the
// arrays, out and lse included. Results are out and lse.
struct Merge {
  mla::CombineParams params;
  unsigned blocks;
  Words partial_out, partial_lse, plan, tokens, sink, out, lse;

  explicit Merge(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    const Words sizes = take(file, 9);
    const Words packed = take(file, sizes[1]);
    if (packed.size() * 4 != sizeof params) fail("parameters of words", sizes[1]);
    std::memcpy(&params, packed.data(), sizeof params);
    blocks = sizes[0];
    const uint32_t* size = &sizes[2];
    for (Words* array : {&partial_out, &partial_lse, &plan, &tokens, &sink, &out, &lse}) *array = take(file, *size++);
    params.split_indptr = plan.empty() ? nullptr : at<int32_t>(plan) + 16;
    params.cu_seqlens_q = at<int32_t>(tokens);
    params.attn_sink = at<float>(sink);
    params.out = at<void>(out);
    params.lse = at<float>(lse);
  }

  void save(const char* path) const {
    std::FILE* file = std::fopen(path, "wb");
    for (const Words* array : {&out, &lse}) std::fwrite(array->data(), 4, array->size(), file);
    std::fclose(file);
  }
};
