// Number formats: f16, bf16, the 8, 6 and 4 bit floats, and the f32 functions of the vector unit.
// Everything rounds to nearest even once, in an order that does not depend on the host.
#pragma once
#include "base.hpp"

namespace emulator {

inline u32 word(float x) { return bit_cast<u32>(x); }
inline float real(u32 x) { return bit_cast<float>(x); }

inline float half_to_float(u16 h) {
  u32 sign = u32(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return real(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) {
    float tiny = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return real(sign | word(tiny));
  }
  return real(sign | (exponent + 112) << 23 | mantissa << 13);
}

// x, rounded to a multiple of 2^quantum, ties to even; |x| < 2^(quantum + 52).
inline double round_to(double x, int quantum) {
  double unit = bit_cast<double>(u64(quantum + 52 + 1023) << 52) * 1.5;
  return (x + unit) - unit;
}

inline u16 double_to_half(double x) {
  u64 raw = bit_cast<u64>(x);
  u16 sign = u16(raw >> 48 & 0x8000);
  double a = fabs(x);
  if (a != a) return sign | 0x7e00;
  if (a >= 65520.0) return sign | 0x7c00;
  int exponent = int(raw >> 52 & 0x7ff) - 1023;
  if (exponent < -14) exponent = -14;
  double r = round_to(a, exponent - 10);
  if (r < 6.103515625e-05) return sign | u16(r * 16777216.0);
  u64 q = bit_cast<u64>(r);
  return sign | u16(((q >> 52) - 1023 + 15) << 10 | (q >> 42 & 0x3ff));
}
inline u16 float_to_half(float x) { return double_to_half(x); }

inline u16 float_to_half_toward_zero(float x) {
  u16 near = float_to_half(x);
  if ((near & 0x7c00) == 0x7c00) return x - x == 0 ? (near & 0x8000) | 0x7bff : near;
  return fabsf(half_to_float(near)) > fabsf(x) ? near - 1 : near;
}

inline float bf16_to_float(u16 b) { return real(u32(b) << 16); }
inline u16 float_to_bf16(float x) {
  u32 b = word(x);
  if ((b & 0x7fffffff) > 0x7f800000) return u16(b >> 16 | 0x40);
  return u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// The narrow floats. FNUZ has one NaN (sign bit alone) and no infinity; E4M3 has no infinity; E2M3, E3M2 and E2M1 have
// neither.
enum Narrow { E4M3_FNUZ, E5M2_FNUZ, E4M3, E5M2, E2M3, E3M2, E2M1, NARROW_FORMATS };
struct NarrowFormat {
  int exponent_bits, mantissa_bits, bias;
  double max;
  bool fnuz;
};
constexpr NarrowFormat NARROW[NARROW_FORMATS] = {
    {4, 3, 8, 240.0, true}, {5, 2, 16, 57344.0, true}, {4, 3, 7, 448.0, false}, {5, 2, 15, 57344.0, false},
    {2, 3, 1, 7.5, false},  {3, 2, 3, 28.0, false},    {2, 1, 1, 6.0, false},
};

inline float narrow_to_float(Narrow format, u32 code) {
  const NarrowFormat& f = NARROW[format];
  int bits = f.exponent_bits + f.mantissa_bits;
  u32 sign = code >> bits & 1, exponent = code >> f.mantissa_bits & ((1u << f.exponent_bits) - 1);
  u32 mantissa = code & ((1u << f.mantissa_bits) - 1), magnitude = code & ((1u << bits) - 1);
  if (f.fnuz && sign && !magnitude) return real(0x7fc00000);
  if (format == E4M3 && magnitude == 0x7f) return real(0x7fc00000 | sign << 31);
  if (format == E5M2 && exponent == 31) return real((mantissa ? 0x7fc00000 : 0x7f800000) | sign << 31);
  double value = exponent ? ldexp(1.0 + mantissa / double(1 << f.mantissa_bits), int(exponent) - f.bias)
                          : ldexp(mantissa / double(1 << f.mantissa_bits), 1 - f.bias);
  return float(sign ? -value : value);
}

// Overflow gives the largest number if `saturate`, else the format's infinity or NaN.
inline u32 float_to_narrow(Narrow format, double x, bool saturate) {
  const NarrowFormat& f = NARROW[format];
  int bits = f.exponent_bits + f.mantissa_bits;
  u32 sign = u32(bit_cast<u64>(x) >> 63);
  double a = fabs(x);
  bool has_nan = format <= E5M2;
  u32 top = f.fnuz || !has_nan ? (1u << bits) - 1 : format == E4M3 ? 0x7e : 0x7b;
  u32 nan = f.fnuz ? 0x80 : (format == E4M3 ? 0x7f : 0x7e) | sign << bits;
  if (a != a) return has_nan ? nan : top | sign << bits;
  int exponent = a > 0 ? int(bit_cast<u64>(a) >> 52) - 1023 : -1023;
  if (exponent < 1 - f.bias) exponent = 1 - f.bias;
  double r = exponent > 60 ? a : round_to(a, exponent - f.mantissa_bits);
  if (r > f.max) {
    if (saturate ? format != E5M2 || a <= 3.5e38 : !has_nan) return top | sign << bits;
    if (f.fnuz) return 0x80;
    return (format == E5M2 ? 0x7c : 0x7f) | sign << bits;
  }
  double smallest = ldexp(1.0, 1 - f.bias);
  u32 magnitude;
  if (r < smallest) {
    magnitude = u32(r / smallest * (1 << f.mantissa_bits));
  } else {
    u64 q = bit_cast<u64>(r);
    magnitude = u32(((q >> 52) - 1023 + f.bias) << f.mantissa_bits |
                    (q >> (52 - f.mantissa_bits) & ((1u << f.mantissa_bits) - 1)));
  }
  if (f.fnuz && !magnitude) return 0;
  return magnitude | sign << bits;
}

// a * b + c for one later rounding to f32: the product is exact in double, the sum is rounded to odd, so that a
// rounding to fewer bits is right, denormal results included.
inline double fused_wide(float a, float b, float c) {
  double p = double(a) * b, s = p + c, t = s - p, error = (p - (s - t)) + (double(c) - t);
  u64 raw = bit_cast<u64>(s);
  if ((error < 0 || error > 0) && !(raw & 1)) raw += ((error > 0) == (s > 0)) ? 1 : u64(-1);
  return bit_cast<double>(raw);
}
inline float fused(float a, float b, float c) { return float(fused_wide(a, b, c)); }

inline float flush(float x) { return (word(x) & 0x7f800000) ? x : real(word(x) & 0x80000000); }

// v_exp_f32, v_log_f32, v_rcp_f32, v_rsq_f32, v_sqrt_f32: the nearest float of a double evaluation good to 2^-48
// (relative), denormal inputs and results flushed, which is what the compiler's own expansions assume of the hardware.
inline float exp2_f32(float x) {
  if (x != x) return x;
  if (x >= 128.0f) return real(0x7f800000);
  if (x < -126.0f) return 0.0f;
  double n = round_to(x, 0), f = (double(x) - n) * 0.693147180559945309417;
  double p = 1.0 / 479001600.0;
  constexpr double INVERSE_FACTORIAL[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                          1.0 / 5040,     1.0 / 720,     1.0 / 120,    1.0 / 24,
                                          1.0 / 6,        0.5,           1.0,          1.0};
  for (double c : INVERSE_FACTORIAL) p = p * f + c;
  return flush(float(p * bit_cast<double>(u64(i64(n) + 1023) << 52)));
}
inline float log2_f32(float x) {
  x = flush(x);
  if (x == 0) return real(0xff800000);
  if (x != x || x < 0) return real(0x7fc00000);
  if (word(x) == 0x7f800000) return x;
  u32 b = word(x);
  int exponent = int(b >> 23) - 127;
  double m = real((b & 0x7fffff) | 0x3f800000);
  if (m > 1.4142135623730951) m *= 0.5, exponent++;
  double t = (m - 1) / (m + 1), t2 = t * t, s = 0;
  for (int k = 23; k >= 1; k -= 2) s = s * t2 + 1.0 / k;
  return float(exponent + 2.8853900817779268147 * t * s);
}
inline float rcp_f32(float x) { return flush(float(1.0 / flush(x))); }
inline float sqrt_f32(float x) { return float(sqrt(double(flush(x)))); }
inline float rsq_f32(float x) { return flush(float(1.0 / sqrt(double(flush(x))))); }

// Two halves or two bf16 in a word, added each.
inline u32 add_halves(u32 a, u32 b, bool bf16) {
  u32 r = 0;
  for (int h = 0; h < 32; h += 16) {
    u16 x = u16(a >> h), y = u16(b >> h);
    r |= u32(bf16 ? float_to_bf16(bf16_to_float(x) + bf16_to_float(y))
                  : float_to_half(half_to_float(x) + half_to_float(y)))
         << h;
  }
  return r;
}

inline float max_f32(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a > b ? a : b > a ? b : real(word(a) & word(b));
}
inline float min_f32(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b ? a : b < a ? b : real(word(a) | word(b));
}

}  // namespace emulator
