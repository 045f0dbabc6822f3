// Arithmetic of a log-sum-exp merge: floats mapped to ordered integers, and an accumulator of the largest lse with a
// sum relative to it. Nothing here compares a float that may be NaN (combine.hpp says why).
#pragma once

#include "common/device.hpp"
#include "common/logarithm.hpp"

namespace mla {

constexpr int INFINITY_BITS = 0x7f800000;

// An int that orders as the float does, with every NaN above +inf.
MLA_DEVICE int float_to_ordered_int(float x) {
  const int bits = bit_cast<int>(x);
  if ((bits & 0x7fffffff) > INFINITY_BITS) return 0x7fc00000;
  return bits ^ (bits >> 31 & 0x7fffffff);
}
MLA_DEVICE float ordered_int_to_float(int order) { return bit_cast<float>(order ^ (order >> 31 & 0x7fffffff)); }
constexpr int ORDERED_MINUS_INFINITY = static_cast<int>(0xff800000u ^ 0x7fffffffu);  // of -inf
constexpr int ORDERED_INFINITY = INFINITY_BITS;

// e^x for x <= 0 to 3 units in the last place, results below the smallest normal number included.
template <class Wave>
MLA_DEVICE float exp_of(float x) {
  x = __builtin_fmaxf(x, -150.0f);  // e^-150 rounds to zero; -inf arrives here too
  const float y = x * LOG2_E;
  const float rest = __builtin_fmaf(x, LOG2_E_REST, __builtin_fmaf(x, LOG2_E, -y));
  const float power = Wave::exp2(y);
  return __builtin_fmaf(power, rest * LN_2, power);
}

// The accumulator of a row: the largest log-sum-exp, as an ordered integer, and the sum of e^(lse - largest).
struct LseAccum {
  int largest;
  float sum;

  // The value subtracted from a log-sum-exp before e^ is taken, so that the result is finite; 0 for a row without keys.
  MLA_DEVICE float base() const {
    return largest == ORDERED_MINUS_INFINITY || largest >= ORDERED_INFINITY ? 0.0f : ordered_int_to_float(largest);
  }
};

}  // namespace mla
