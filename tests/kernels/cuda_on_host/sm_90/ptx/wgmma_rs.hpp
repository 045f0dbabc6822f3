// wgmma on a CPU: a product reads its registers and shared memory only when a wait ends it, so that whatever is written too
// early is found.
#pragma once

#include <deque>

#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/wgmma.hpp"

namespace mla::sm_90 {

struct Product {
  float* acc;
  const uint32_t* a;
  uint64_t b;
  bool add;
  int columns;
};
struct Products {
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
};
inline Products products[BLOCK_THREADS];

template <int REGS>
void mma_rs(float (&acc)[REGS], const uint32_t (&a)[4], uint64_t b, bool add) {
  products[current].open.push_back({acc, a, b, add, REGS * 2});
}

// Element (k, column) of the second operand, which is contiguous along k.
inline float element_of_b(uint64_t descriptor, int k, int column) {
  const uint32_t start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4,
                 stride = (descriptor >> 32 & 0x3FFF) << 4;
  uint32_t at = start + column / 8 * stride;
  if (static_cast<Swizzle>(descriptor >> 62) == Swizzle::none) {
    at += k / 8 * leading + column % 8 * 16 + k % 8 * 2;
  } else {
    at += column % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
  }
  uint16_t bits;
  std::memcpy(&bits, shared_at(at, 2), 2);
  return fp16_to_float(bits);
}

// This lane's part of a product: the rows of the first operand are spread over the quad.
inline void execute(const Product& product, int group, int index) {
  const int quad = current / 4 * 4, lane = current % 4;
  float rows[2][16];
  for (int t = 0; t < 4; ++t) {
    const Product& other = products[quad + t].groups[group][index];
    if (other.b != product.b) fail("lanes disagree on a descriptor", index);
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half)
        rows[i % 2][i / 2 * 8 + 2 * t + half] = fp16_to_float(static_cast<uint16_t>(other.a[i] >> 16 * half));
  }
  for (int i = 0; i < product.columns / 2; ++i) {
    const int column = i / 4 * 8 + lane * 2 + i % 2;
    float sum = product.add ? product.acc[i] : 0.0f;
    for (int k = 0; k < 16; ++k) sum += rows[i / 2 % 2][k] * element_of_b(product.b, k, column);
    product.acc[i] = sum;
  }
}

inline void commit_products() {
  products[current].groups.push_back(products[current].open);
  products[current].open.clear();
}

inline void wait_for_products(int pending) {
  meet_warpgroup(0);
  auto& groups = products[current].groups;
  const int ended = max(0, static_cast<int>(groups.size()) - pending);
  for (int group = 0; group < ended; ++group)
    for (size_t i = 0; i < groups[group].size(); ++i) execute(groups[group][i], group, static_cast<int>(i));
  meet_warpgroup(0);
  groups.erase(groups.begin(), groups.begin() + ended);
  meet_warpgroup(0);
}

}  // namespace mla::sm_90
