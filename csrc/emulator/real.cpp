// f32, f64 and f16 arithmetic of the vector unit.
#include "vector.hpp"

namespace emulator {

static float median(float a, float b, float c) {
  if (a != a || b != b || c != c) return min_f32(min_f32(a, b), c);
  float most =
      max_f32(max_f32(a, b), c);  // either zero equals it: the manual's order of the tests decides the sign of a zero
  return most == a ? max_f32(b, c) : most == b ? max_f32(a, c) : max_f32(a, b);
}
// The IEEE 754-2019 maximum and minimum: NaN wins.
static float maximum(float a, float b) { return a != a ? a : b != b ? b : max_f32(a, b); }
static float minimum(float a, float b) { return a != a ? a : b != b ? b : min_f32(a, b); }
static float fraction(float x) {
  float r = float(double(x) - floor(double(x)));
  return r >= 1.0f ? real(0x3f7fffff) : r;  // NaN stays
}
static double max_f64(double a, double b) { return a != a ? b : b != b ? a : a > b || (a == b && !signbit(a)) ? a : b; }
static double min_f64(double a, double b) { return a != a ? b : b != b ? a : a < b || (a == b && signbit(a)) ? a : b; }
static float scale_by(float x, i32 e) { return float(ldexp(double(x), e < -1200 ? -1200 : e > 1200 ? 1200 : e)); }
static i32 exponent_of(float x) {
  int e = 0;
  if (x - x == 0) frexp(double(x), &e);
  return e;
}
static float mantissa_of(float x) {
  int e;
  return x - x == 0 ? float(frexp(double(x), &e)) : x;
}
static float legacy_multiply(float a, float b) { return a == 0 || b == 0 ? 0.0f : a * b; }
static float bf16_dot(u32 a, u32 b, float c) {
  double low = double(bf16_to_float(u16(a))) * bf16_to_float(u16(b));
  return float(low + double(bf16_to_float(u16(a >> 16))) * bf16_to_float(u16(b >> 16)) + c);
}
static float half_dot(u32 a, u32 b, float c) {
  double low = double(half_to_float(u16(a))) * half_to_float(u16(b));
  return float(low + double(half_to_float(u16(a >> 16))) * half_to_float(u16(b >> 16)) + c);
}
static float turns(float x) { return float(double(x) - floor(double(x))); }
constexpr double TURN = 6.283185307179586;

// v_fma_f16: f32 holds every product of two halves, but not every sum with a third; `fused` rounds the sum once to f32
// and f32 to f16 is a second rounding, so the sum is made in double, which holds it whenever the result is finite, down
// to a sticky bit that cannot tie.
static Half fused_half(Half a, Half b, Half c) {
  double p = double(a.value) * b.value, s = p + c.value;
  return Half{half_to_float(double_to_half(s))};
}

static const Opcode entries[] = {
    vector("v_add_f32", [](float a, float b) { return a + b; }),
    vector("v_sub_f32", [](float a, float b) { return a - b; }),
    vector("v_subrev_f32", [](float a, float b) { return b - a; }),
    vector("v_mul_f32", [](float a, float b) { return a * b; }),
    vector("v_mul_legacy_f32", [](float a, float b) { return legacy_multiply(a, b); }),
    vector("v_max_f32", [](float a, float b) { return max_f32(a, b); }),
    vector("v_min_f32", [](float a, float b) { return min_f32(a, b); }),
    vector("v_max3_f32", [](float a, float b, float c) { return max_f32(max_f32(a, b), c); }),
    vector("v_min3_f32", [](float a, float b, float c) { return min_f32(min_f32(a, b), c); }),
    vector(
        "v_maximum3_f32", [](float a, float b, float c) { return maximum(maximum(a, b), c); }, VALU, GFX950),
    vector(
        "v_minimum3_f32", [](float a, float b, float c) { return minimum(minimum(a, b), c); }, VALU, GFX950),
    vector("v_med3_f32", [](float a, float b, float c) { return median(a, b, c); }),
    vector("v_fma_f32", [](float a, float b, float c) { return fused(a, b, c); }),
    vector_accumulate("v_fmac_f32", [](float a, float b, float c) { return fused(a, b, c); }),
    vector("v_fmaak_f32", [](float a, float b, float c) { return fused(a, b, c); }),
    vector("v_fmamk_f32", [](float a, float b, float c) { return fused(a, b, c); }),
    vector(
        "v_exp_f32", [](float a) { return exp2_f32(a); }, TRANSCENDENTAL),
    vector(
        "v_log_f32", [](float a) { return log2_f32(a); }, TRANSCENDENTAL),
    vector(
        "v_rcp_f32", [](float a) { return rcp_f32(a); }, TRANSCENDENTAL),
    vector(
        "v_rcp_iflag_f32", [](float a) { return rcp_f32(a); }, TRANSCENDENTAL),
    vector(
        "v_rsq_f32", [](float a) { return rsq_f32(a); }, TRANSCENDENTAL),
    vector(
        "v_sqrt_f32", [](float a) { return sqrt_f32(a); }, TRANSCENDENTAL),
    vector(
        "v_sin_f32", [](float a) { return float(sin(TURN * turns(a))); }, TRANSCENDENTAL),
    vector(
        "v_cos_f32", [](float a) { return float(cos(TURN * turns(a))); }, TRANSCENDENTAL),
    vector("v_ldexp_f32", [](float a, i32 b) { return scale_by(a, b); }),
    vector("v_frexp_exp_i32_f32", [](float a) { return exponent_of(a); }),
    vector("v_frexp_mant_f32", [](float a) { return mantissa_of(a); }),
    vector("v_fract_f32", [](float a) { return fraction(a); }),
    vector("v_floor_f32", [](float a) { return floorf(a); }),
    vector("v_ceil_f32", [](float a) { return ceilf(a); }),
    vector("v_trunc_f32", [](float a) { return truncf(a); }),
    vector("v_rndne_f32", [](float a) { return rintf(a); }),
    vector_accumulate(
        "v_dot2c_f32_bf16", [](u32 a, u32 b, float c) { return bf16_dot(a, b, c); }, GFX950),
    vector(
        "v_dot2_f32_bf16", [](u32 a, u32 b, float c) { return bf16_dot(a, b, c); }, VALU, GFX950),
    vector("v_dot2_f32_f16", [](u32 a, u32 b, float c) { return half_dot(a, b, c); }),
    vector_accumulate("v_dot2c_f32_f16", [](u32 a, u32 b, float c) { return half_dot(a, b, c); }),
    vector("v_add_f64", [](double a, double b) { return a + b; }),
    vector("v_mul_f64", [](double a, double b) { return a * b; }),
    vector("v_fma_f64", [](double a, double b, double c) { return fma(a, b, c); }),
    vector_accumulate("v_fmac_f64", [](double a, double b, double c) { return fma(a, b, c); }),
    vector("v_max_f64", [](double a, double b) { return max_f64(a, b); }),
    vector("v_min_f64", [](double a, double b) { return min_f64(a, b); }),
    vector("v_ldexp_f64", [](double a, i32 b) { return ldexp(a, b); }),
    vector(
        "v_rcp_f64", [](double a) { return 1.0 / a; }, TRANSCENDENTAL),
    vector(
        "v_rsq_f64", [](double a) { return 1.0 / sqrt(a); }, TRANSCENDENTAL),
    vector(
        "v_sqrt_f64", [](double a) { return sqrt(a); }, TRANSCENDENTAL),
    vector("v_fract_f64",
           [](double a) {
             double r = a - floor(a);
             return r >= 1 ? 0x1.fffffffffffffp-1 : r;
           }),
    vector("v_frexp_exp_i32_f64",
           [](double a) {
             int e = 0;
             if (a - a == 0) frexp(a, &e);
             return e;
           }),
    vector("v_frexp_mant_f64",
           [](double a) {
             int e;
             return a - a == 0 ? frexp(a, &e) : a;
           }),
    vector("v_floor_f64", [](double a) { return floor(a); }),
    vector("v_ceil_f64", [](double a) { return ceil(a); }),
    vector("v_trunc_f64", [](double a) { return trunc(a); }),
    vector("v_rndne_f64", [](double a) { return rint(a); }),
    vector("v_add_f16", [](Half a, Half b) { return Half{a.value + b.value}; }),
    vector("v_sub_f16", [](Half a, Half b) { return Half{a.value - b.value}; }),
    vector("v_subrev_f16", [](Half a, Half b) { return Half{b.value - a.value}; }),
    vector("v_mul_f16", [](Half a, Half b) { return Half{a.value * b.value}; }),
    vector("v_max_f16", [](Half a, Half b) { return Half{max_f32(a.value, b.value)}; }),
    vector("v_min_f16", [](Half a, Half b) { return Half{min_f32(a.value, b.value)}; }),
    vector(
        "v_max3_f16", [](Half a, Half b, Half c) { return Half{max_f32(max_f32(a.value, b.value), c.value)}; }, VALU,
        ANY_ARCH, PRESERVES_HIGH),
    vector(
        "v_fma_f16", [](Half a, Half b, Half c) { return fused_half(a, b, c); }, VALU, ANY_ARCH, PRESERVES_HIGH),
    vector(
        "v_min3_f16", [](Half a, Half b, Half c) { return Half{min_f32(min_f32(a.value, b.value), c.value)}; }, VALU,
        ANY_ARCH, PRESERVES_HIGH),
    vector(
        "v_med3_f16", [](Half a, Half b, Half c) { return Half{median(a.value, b.value, c.value)}; }, VALU, ANY_ARCH,
        PRESERVES_HIGH),
    vector(
        "v_rcp_f16", [](Half a) { return Half{half_to_float(double_to_half(1.0 / a.value))}; }, TRANSCENDENTAL),
    vector(
        "v_rsq_f16", [](Half a) { return Half{half_to_float(double_to_half(1.0 / sqrt(double(a.value))))}; },
        TRANSCENDENTAL),
    vector(
        "v_sqrt_f16", [](Half a) { return Half{half_to_float(double_to_half(sqrt(double(a.value))))}; },
        TRANSCENDENTAL),
    vector(
        "v_exp_f16", [](Half a) { return Half{half_to_float(double_to_half(exp2(double(a.value))))}; }, TRANSCENDENTAL),
    vector(
        "v_log_f16", [](Half a) { return Half{half_to_float(double_to_half(log2(double(a.value))))}; }, TRANSCENDENTAL),
    vector("v_ldexp_f16",
           [](Half a, u32 b) { return Half{half_to_float(double_to_half(ldexp(double(a.value), i16(b))))}; }),
    vector("v_floor_f16", [](Half a) { return Half{floorf(a.value)}; }),
    vector("v_ceil_f16", [](Half a) { return Half{ceilf(a.value)}; }),
    vector("v_trunc_f16", [](Half a) { return Half{truncf(a.value)}; }),
    vector("v_rndne_f16", [](Half a) { return Half{rintf(a.value)}; }),
};
extern const Table real_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
