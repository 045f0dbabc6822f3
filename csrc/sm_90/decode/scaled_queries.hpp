// bf16 queries as fp16, to which e4m3 keys are converted in a third of the instructions that bf16 takes.
//
// bf16 has more exponents than fp16, so a row of queries is scaled by a power of two, by which its scores are divided.
// Values 2^-29 of the row's largest and more are exact; smaller ones are off by 2^-40 of the largest, less than fp32
// loses in a sum.
#pragma once

#include "sm_90/ptx/convert.hpp"
#include "sm_90/ptx/math.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

// The power of two that brings `largest` to 2^14 and more, below 2^15, within what fp32 can hold; 1 where it is not
// finite.
MLA_DEVICE float power_to_fp16(float largest) {
  const int exponent = static_cast<int>(bit_cast<uint32_t>(largest) >> 23);  // biased; 255 of infinity and NaN
  if (exponent == 255 || largest == 0.0f) return 1.0f;
  const int wanted = min(max(127 + 14 - exponent, -112), 112);
  return bit_cast<float>(static_cast<uint32_t>(wanted + 127) << 23);
}

// 1 / power, of a power of two, without the call that a division is.
MLA_DEVICE float inverse_power(float power) { return bit_cast<float>(0x7F000000u - bit_cast<uint32_t>(power)); }

// Two bf16 values times `power`, as fp16.
MLA_DEVICE uint32_t bf16_to_fp16(uint32_t pair, float power) {
  float values[2];
  unpack_pair<bf16>(pair, values);
  return pack_pair<fp16>(values[0] * power, values[1] * power);
}

// A tile's queries as decode has them: half of every row in each of two stages, [BOXES][rows][64 B]. Of its warp's 16
// rows a lane takes 16 bytes of row l / 4, and of row l / 4 + 8, in every box. No swizzle moves bytes out of a row.
struct ScaledQueries {
  // Where these lie in a box; `half` is 1 for the second row.
  MLA_DEVICE static uint32_t place(int half) {
    return warpgroup_thread() / 32 * 1024 + half * 512 + warpgroup_thread() % 32 * 16;
  }

  // The powers of two of this lane's two rows; `box` is the bytes from a box to the next.
  template <int BOXES>
  MLA_DEVICE static void find_powers(const uint32_t (&stages)[2], int box, float (&power)[2]) {
    uint32_t top[2] = {0, 0};  // what is left of a bf16 value without its sign is ordered as its size
#pragma unroll 3
    for (int i = 0; i < BOXES; ++i)
#pragma unroll
      for (int stage = 0; stage < 2; ++stage)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t words[4];
          ld_shared_v4(stages[stage] + i * box + place(half), words);
#pragma unroll
          for (int w = 0; w < 4; ++w) top[half] = max_u16x2(top[half], words[w] & 0x7FFF7FFFu);
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t size = max(top[half] & 0xFFFFu, top[half] >> 16);
      size = max(size, __shfl_xor_sync(~0u, size, 1));
      size = max(size, __shfl_xor_sync(~0u, size, 2));
      power[half] = power_to_fp16(bit_cast<float>(size << 16));
    }
  }

  // Converts this lane's 16 bytes of one of its rows, from one box to the other.
  MLA_DEVICE static void convert(uint32_t to, uint32_t from, int half, float power) {
    uint32_t words[4];
    ld_shared_v4(from + place(half), words);
    st_shared_v4(to + place(half), bf16_to_fp16(words[0], power), bf16_to_fp16(words[1], power),
                 bf16_to_fp16(words[2], power), bf16_to_fp16(words[3], power));
  }

  // Converts a step that lies in registers.
  MLA_DEVICE static void convert_step(uint32_t* q, const float (&power)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = bf16_to_fp16(q[i], power[i % 2]);
  }
};

}  // namespace mla::sm_90
