// What a merge of log-sum-exps is reckoned with: floats in the order of integers, and the largest with a sum relative
// to it. Nothing here compares a float that may be NaN (combine.hpp says why).
#pragma once

#include "common/device.hpp"
#include "common/logarithm.hpp"

namespace mla {

constexpr int INFINITY_BITS = 0x7f800000;

// An int that orders as the float does, with every NaN above +inf.
MLA_DEVICE int order_of(float x) {
  const int bits = bit_cast<int>(x);
  if ((bits & 0x7fffffff) > INFINITY_BITS) return 0x7fc00000;
  return bits ^ (bits >> 31 & 0x7fffffff);
}
MLA_DEVICE float of_order(int order) { return bit_cast<float>(order ^ (order >> 31 & 0x7fffffff)); }
constexpr int ORDER_OF_NOTHING = static_cast<int>(0xff800000u ^ 0x7fffffffu);  // of -inf
constexpr int ORDER_OF_INFINITY = INFINITY_BITS;

// e^x for x <= 0 to 3 units in the last place, results below the smallest normal number included.
template <class Wave>
MLA_DEVICE float exp_of(float x) {
  x = __builtin_fmaxf(x, -150.0f);  // e^-150 rounds to zero; -inf arrives here too
  const float y = x * LOG2_E;
  const float rest = __builtin_fmaf(x, LOG2_E_REST, __builtin_fmaf(x, LOG2_E, -y));
  const float power = Wave::exp2(y);
  return __builtin_fmaf(power, rest * LN_2, power);
}

// What the weights of a row follow from: the largest log-sum-exp (as order_of), and the sum of e^(lse - largest).
struct Merged {
  int largest;
  float sum;

  // What to subtract from a log-sum-exp so that e^ of it is finite. Sums relative to nothing are 0 x 1.
  MLA_DEVICE float base() const {
    return largest == ORDER_OF_NOTHING || largest >= ORDER_OF_INFINITY ? 0.0f : of_order(largest);
  }
};

}  // namespace mla
