// Descriptors and products of wgmma of 64 rows on a CPU, the first operand in registers or shared memory. A product reads
// its operands only when a wait ends it, so that whatever is written too early is found.
#pragma once

#include <deque>

#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

enum class Swizzle : uint64_t { none = 0, bytes128 = 1, bytes64 = 2 };
inline uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>(address >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
inline uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// An operand in shared memory. `across` is its row or column, `k` the depth.
struct Operand {
  uint64_t descriptor;
  bool contiguous_across;  // as V is; else along k

  // The 16 values along k of one row or column. Eight that follow each other in memory are aligned by 16 bytes, below
  // which a swizzle exchanges nothing.
  void read(int across, uint16_t (&values)[16]) const {
    const uint32_t start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4,
                   stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (contiguous_across) {
      for (int k = 0; k < 16; ++k) {
        uint32_t place = start + across / 64 * leading + k / 8 * stride + k % 8 * 128 + across % 64 * 2;
        place ^= (place >> 7 & 7) << 4;
        std::memcpy(&values[k], shared_at(place, 2), 2);
      }
      return;
    }
    const Swizzle swizzle = static_cast<Swizzle>(descriptor >> 62);
    for (int k = 0; k < 16; k += 8) {
      uint32_t place = start + across / 8 * stride;
      if (swizzle == Swizzle::none) {
        place += k / 8 * leading + across % 8 * 16;
      } else {
        const bool wide = swizzle == Swizzle::bytes128;
        place += across % 8 * (wide ? 128 : 64) + k * 2;
        place ^= (place >> 7 & (wide ? 7 : 3)) << 4;
      }
      std::memcpy(&values[k], shared_at(place, 16), 16);
    }
  }
};

struct Product {
  float* acc;
  const uint32_t* registers;  // of the first operand, or null
  Operand a, b;
  bool add;
  int columns;
  void (*execute)(const Product&, int group, int index);
};
struct Products {
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
};
inline OfEachBlock<Products, BLOCK_THREADS> products;

// This lane's part of a product of type T: registers of the first operand's rows are spread over the quad.
template <class T>
void execute(const Product& product, int group, int index) {
  const auto to_float = [](uint16_t bits) { return T::is_bf16 ? bf16_to_float(bits) : fp16_to_float(bits); };
  const int quad = current / 4 * 4, row = current % 128 / 32 * 16 + current % 32 / 4;
  uint16_t bits[16];
  float rows[2][16];
  for (int half = 0; half < 2; ++half) {
    if (product.registers == nullptr) product.a.read(row + 8 * half, bits);
    for (int k = 0; k < 16; ++k) {
      if (product.registers != nullptr) {
        const Product& other = products[quad + k % 8 / 2].groups[group][index];
        if (other.b.descriptor != product.b.descriptor) fail("lanes disagree on a descriptor", index);
        bits[k] = static_cast<uint16_t>(other.registers[k / 8 * 2 + half] >> 16 * (k % 2));
      }
      rows[half][k] = to_float(bits[k]);
    }
  }
  for (int i = 0; i < product.columns / 2; i += 4)
    for (int c = 0; c < 2; ++c) {
      product.b.read(i / 4 * 8 + current % 4 * 2 + c, bits);
      float sums[2];
      for (int half = 0; half < 2; ++half) sums[half] = product.add ? product.acc[i + 2 * half + c] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        const float value = to_float(bits[k]);
        for (int half = 0; half < 2; ++half) sums[half] += rows[half][k] * value;
      }
      for (int half = 0; half < 2; ++half) product.acc[i + 2 * half + c] = sums[half];
    }
}

// The same of e4m3, 32 deep: a register has four values, and a row of `b` lies as 16 values of 16 bits would.
inline void execute_e4m3(const Product& product, int group, int index) {
  const int quad = current / 4 * 4;
  float rows[2][32];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 32; ++k) {
      const Product& other = products[quad + k % 16 / 4].groups[group][index];
      if (other.b.descriptor != product.b.descriptor) fail("lanes disagree on a descriptor", index);
      rows[half][k] = e4m3_to_float(static_cast<uint8_t>(other.registers[k / 16 * 2 + half] >> 8 * (k % 4)));
    }
  for (int i = 0; i < product.columns / 2; i += 4)
    for (int c = 0; c < 2; ++c) {
      uint16_t pairs[16];
      product.b.read(i / 4 * 8 + current % 4 * 2 + c, pairs);
      for (int half = 0; half < 2; ++half) {
        float& sum = product.acc[i + 2 * half + c];
        if (!product.add) sum = 0.0f;
        for (int k = 0; k < 32; ++k)
          sum += rows[half][k] * e4m3_to_float(static_cast<uint8_t>(pairs[k / 2] >> 8 * (k % 2)));
      }
    }
}

inline void commit_products() {
  products[current].groups.push_back(products[current].open);
  products[current].open.clear();
}

// A warp multiplies its own rows, and its wait says nothing of those of the other three.
inline void wait_for_products(int pending) {
  __syncwarp();
  auto& groups = products[current].groups;
  const int ended = max(0, static_cast<int>(groups.size()) - pending);
  for (int group = 0; group < ended; ++group)
    for (size_t i = 0; i < groups[group].size(); ++i) groups[group][i].execute(groups[group][i], group, static_cast<int>(i));
  __syncwarp();
  groups.erase(groups.begin(), groups.begin() + ended);
  __syncwarp();
}

}  // namespace mla::sm_90
