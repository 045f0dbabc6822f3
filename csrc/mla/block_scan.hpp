// Sums and maxima over the threads of a workgroup. Every thread of the workgroup must call them.
#pragma once

#include "mla/device.hpp"

namespace mla {

// What another lane of the wave holds.
template <class Wave>
MLA_DEVICE int64_t from_lane(int64_t x, int source) {
  const uint64_t bits = static_cast<uint64_t>(x);
  const uint32_t low = static_cast<uint32_t>(Wave::from_lane(static_cast<int>(bits), source));
  const uint32_t high = static_cast<uint32_t>(Wave::from_lane(static_cast<int>(bits >> 32), source));
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

template <class Wave, int waves>
struct BlockScan {
  int64_t sums[waves];
  int maxima[waves];

  // The sum over the threads before this one; `total` becomes the sum over all.
  MLA_DEVICE int64_t exclusive(int64_t value, int64_t& total) {
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    int64_t inclusive = value;
    for (int apart = 1; apart < Wave::lanes; apart *= 2) {
      const int64_t other = from_lane<Wave>(inclusive, lane >= apart ? lane - apart : lane);
      if (lane >= apart) inclusive += other;
    }
    if (lane == Wave::lanes - 1) sums[wave] = inclusive;
    block_sync();
    int64_t before = 0;
    total = 0;
    for (int w = 0; w < waves; ++w) {
      if (w < wave) before += sums[w];
      total += sums[w];
    }
    block_sync();  // the next call writes sums again
    return before + inclusive - value;
  }

  // The largest of all threads' values.
  MLA_DEVICE int largest(int value) {
    value = Wave::template max_over<Wave::lanes>(value, thread_id() % Wave::lanes);
    if (thread_id() % Wave::lanes == 0) maxima[thread_id() / Wave::lanes] = value;
    block_sync();
    int all = maxima[0];
    for (int w = 1; w < waves; ++w) all = maxima[w] > all ? maxima[w] : all;
    block_sync();
    return all;
  }
};

}  // namespace mla
