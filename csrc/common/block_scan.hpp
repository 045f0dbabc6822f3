// Sums and maxima over the threads of a workgroup. Every thread of the workgroup must call them.
#pragma once

#include "common/device.hpp"

namespace mla {

// Returns the value of another lane of the wave.
template <class Wave>
MLA_DEVICE int64_t from_lane(int64_t x, int source) {
  const uint64_t bits = static_cast<uint64_t>(x);
  const uint32_t low = static_cast<uint32_t>(Wave::from_lane(static_cast<int>(bits), source));
  const uint32_t high = static_cast<uint32_t>(Wave::from_lane(static_cast<int>(bits >> 32), source));
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}
template <class Wave>
MLA_DEVICE int from_lane(int x, int source) {
  return Wave::from_lane(x, source);
}

// Return the largest value of a wave. 64 bits are compared by halves: among the lanes with the largest high half, the
// largest low half wins, compared as a signed number in the same order.
template <class Wave>
MLA_DEVICE int32_t wave_largest(int32_t x) {
  return Wave::template max_over<Wave::lanes>(x, thread_id() % Wave::lanes);
}
template <class Wave>
MLA_DEVICE int64_t wave_largest(int64_t x) {
  const int high = static_cast<int>(x >> 32);
  const int low = static_cast<int>(static_cast<uint32_t>(x) ^ 0x80000000u);
  const int highest = wave_largest<Wave>(high);
  const int lowest = static_cast<int>(0x80000000u);
  const uint32_t best = static_cast<uint32_t>(wave_largest<Wave>(high == highest ? low : lowest));
  return static_cast<int64_t>(static_cast<uint64_t>(highest) << 32 | (best ^ 0x80000000u));
}

// Returns the best of the values that each of `n` waves found, by the shortest chain of comparisons. `better(a, b)`
// says whether to take a.
template <int n, class Better>
MLA_DEVICE int64_t best_among(const int64_t (&values)[n], Better better) {
  int64_t left[n];
#pragma unroll
  for (int i = 0; i < n; ++i) left[i] = values[i];
#pragma unroll
  for (int apart = 1; apart < n; apart *= 2) {
#pragma unroll
    for (int i = 0; i + apart < n; i += 2 * apart)
      left[i] = better(left[i], left[i + apart]) ? left[i] : left[i + apart];
  }
  return left[0];
}

template <class Wave, int waves>
struct BlockScan {
  int64_t sums[waves];
  int maxima[waves];
  int counts[2][waves];

  // Returns how many of the threads before this one hold `low`, plus 65536 times as many as hold `high`; `total`
  // becomes the same of all threads. `turn` is the number of such calls before this one.
  MLA_DEVICE uint32_t count_before(bool low, bool high, int turn, uint32_t& total) {
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    int all_low, all_high;
    uint32_t before = Wave::count_before(low, lane, all_low);
    before += static_cast<uint32_t>(Wave::count_before(high, lane, all_high)) << 16;
    if (lane == 0) counts[turn & 1][wave] = all_low + (all_high << 16);
    block_sync();  // a thread that writes these counts again has passed the next call's barrier
    total = 0;
    for (int w = 0; w < waves; ++w) {
      const uint32_t held = static_cast<uint32_t>(counts[turn & 1][w]);
      if (w < wave) before += held;
      total += held;
    }
    return before;
  }

  // Returns the sum over the threads before this one; `total` becomes the sum over all.
  template <class Number>
  MLA_DEVICE Number exclusive(Number value, Number& total) {
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    Number inclusive = value;
    for (int apart = 1; apart < Wave::lanes; apart *= 2) {
      const Number other = from_lane<Wave>(inclusive, lane >= apart ? lane - apart : lane);
      if (lane >= apart) inclusive += other;
    }
    if (lane == Wave::lanes - 1) sums[wave] = inclusive;
    block_sync();
    Number before = 0;
    total = 0;
    for (int w = 0; w < waves; ++w) {
      if (w < wave) before += static_cast<Number>(sums[w]);
      total += static_cast<Number>(sums[w]);
    }
    block_sync();  // the next call writes sums again
    return before + inclusive - value;
  }

  // Returns the sum of all threads' values; `largest` becomes the largest `other`. Before the next call must come
  // another barrier.
  MLA_DEVICE int sum(int value, int other, int& largest) {
    const int lane = thread_id() % Wave::lanes, wave = thread_id() / Wave::lanes;
    value = Wave::template sum_over<Wave::lanes>(value, lane);
    other = wave_largest<Wave>(other);
    if (lane == 0) {
      sums[wave] = value;
      maxima[wave] = other;
    }
    block_sync();
    int all = static_cast<int>(sums[0]);
    largest = maxima[0];
    for (int w = 1; w < waves; ++w) {
      all += static_cast<int>(sums[w]);
      largest = maxima[w] > largest ? maxima[w] : largest;
    }
    return all;
  }

  // Returns the largest of all threads' values.
  MLA_DEVICE int64_t largest(int64_t value) {
    value = wave_largest<Wave>(value);
    if (thread_id() % Wave::lanes == 0) sums[thread_id() / Wave::lanes] = value;
    block_sync();
    const int64_t all = best_among(sums, [](int64_t a, int64_t b) { return a > b; });
    block_sync();
    return all;
  }
  MLA_DEVICE int largest(int value) {
    value = wave_largest<Wave>(value);
    if (thread_id() % Wave::lanes == 0) maxima[thread_id() / Wave::lanes] = value;
    block_sync();
    int all = maxima[0];
    for (int w = 1; w < waves; ++w) all = maxima[w] > all ? maxima[w] : all;
    block_sync();
    return all;
  }
};

}  // namespace mla
