// Vector stores of fp32 values as any output type.
#pragma once

#include "common/device.hpp"

namespace mla {

constexpr int OUT_BF16 = 0;
constexpr int OUT_FP16 = 1;
constexpr int OUT_FP32 = 2;

// `count` values to element `at` of an array of `type` (OUT_*), in stores of up to 16 bytes.
template <class Wave, int count>
MLA_DEVICE void store_as(void* array, int type, int64_t at, const float (&values)[count]) {
  if (type == OUT_FP32) {
    constexpr int width = count < 4 ? count : 4;
    for (int i = 0; i < count; i += width) {
      Vec<float, width> wide;
      for (int k = 0; k < width; ++k) wide[k] = values[i + k];
      *reinterpret_cast<Vec<float, width>*>(static_cast<float*>(array) + at + i) = wide;
    }
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(array) + at;
  if constexpr (count == 1) {
    *to = static_cast<uint16_t>(type == OUT_BF16 ? Wave::pack_bf16(values[0], 0.0f) : Wave::pack_fp16(values[0], 0.0f));
  } else {
    Vec<uint32_t, count / 2> pairs;
    if (type == OUT_BF16) {
      for (int k = 0; k < count / 2; ++k) pairs[k] = Wave::pack_bf16(values[2 * k], values[2 * k + 1]);
    } else {
      for (int k = 0; k < count / 2; ++k) pairs[k] = Wave::pack_fp16(values[2 * k], values[2 * k + 1]);
    }
    *reinterpret_cast<Vec<uint32_t, count / 2>*>(to) = pairs;
  }
}

}  // namespace mla
