// Selection by mask, bitwise functions of three inputs, and the division helpers.
#include "vector.hpp"

namespace emulator {

static void conditional_mask(Wave& wave, const Inst& in) {
  u32 ra[LANES], rb[LANES], out[LANES];
  const u32 *a = Lane<u32>::read(wave, in, 1, ra), *b = Lane<u32>::read(wave, in, 2, rb);
  u64 mask = scalar64(wave, in.op[3]);
  for (int l = 0; l < LANES; l++) out[l] = mask >> l & 1 ? b[l] : a[l];
  commit_row(wave, in, 0, out, false);
}

// Bit (a << 2 | b << 1 | c) of the modifier is the result of the three input bits.
static u32 combine_bits(i64 truth, u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int i = 0; i < 8; i++)
    if (truth >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
static void bit_function(Wave& wave, const Inst& in) {
  u32 ra[LANES], rb[LANES], rc[LANES], out[LANES];
  const u32 *a = source_row(wave, in, 1, ra), *b = source_row(wave, in, 2, rb), *c = source_row(wave, in, 3, rc);
  for (int l = 0; l < LANES; l++) out[l] = combine_bits(in.mod[mod_bitop3], a[l], b[l], c[l]);
  commit_row(wave, in, 0, out, false);
}
// Works on the halves that op_sel picks.
static void bit_function_16(Wave& wave, const Inst& in) {
  u32 ra[LANES], rb[LANES], rc[LANES];
  u16 out[LANES];
  const u32 *a = source_row(wave, in, 1, ra), *b = source_row(wave, in, 2, rb), *c = source_row(wave, in, 3, rc);
  i64 high = in.mod[mod_op_sel];
  int sa = high & 1 ? 16 : 0, sb = high & 2 ? 16 : 0, sc = high & 4 ? 16 : 0;
  for (int l = 0; l < LANES; l++) out[l] = u16(combine_bits(in.mod[mod_bitop3], a[l] >> sa, b[l] >> sb, c[l] >> sc));
  commit_half(wave, in, out);
}

// v_div_scale_f32 d, vcc, s0, denominator, numerator: s0 is the operand to be scaled by 2^64 so that the refinement of
// numerator / denominator neither overflows nor loses bits; vcc says that v_div_fmas must scale its result back.
static void divide_scale(Wave& wave, const Inst& in) {
  float r0[LANES], r1[LANES], r2[LANES];
  const float *x = Lane<float>::read(wave, in, 2, r0), *d = Lane<float>::read(wave, in, 3, r1),
              *n = Lane<float>::read(wave, in, 4, r2);
  u32 out[LANES];
  u64 scaled = 0;
  auto exponent = [](float v) { return int(word(v) >> 23 & 255); };
  auto tiny = [](float v) { return (word(v) & 0x7f800000) == 0 && v != 0; };
  constexpr float UP = 18446744073709551616.0f;  // 2^64
  for (int l = 0; l < LANES; l++) {
    float r = x[l];
    bool flag = false, is_denominator = word(x[l]) == word(d[l]), is_numerator = word(x[l]) == word(n[l]);
    float inverse = float(1.0 / double(d[l])), quotient = float(double(n[l]) / double(d[l]));
    if (n[l] == 0 || d[l] == 0) {
      r = real(0x7fc00000);
    } else if (exponent(n[l]) - exponent(d[l]) >= 96) {
      flag = true;
      if (is_denominator) r = x[l] * UP;
    } else if (tiny(d[l])) {
      r = x[l] * UP;
    } else if (tiny(inverse) && tiny(quotient)) {
      flag = true;
      if (is_denominator) r = x[l] / UP;  // down: up would overflow every such denominator
    } else if (tiny(inverse)) {
      r = x[l] / UP;
    } else if (tiny(quotient)) {
      flag = true;
      if (is_numerator) r = x[l] * UP;
    } else if (exponent(n[l]) <= 23) {
      r = x[l] * UP;
    }
    out[l] = word(r);
    scaled |= u64(flag) << l;
  }
  u64 lanes = wave.exec;
  commit_row(wave, in, 0, out, false);
  wave.set_scalar64(in.op[1].index, scaled & lanes);
}

static void divide_fmas(Wave& wave, const Inst& in) {
  float r0[LANES], r1[LANES], r2[LANES];
  const float *a = Lane<float>::read(wave, in, 1, r0), *b = Lane<float>::read(wave, in, 2, r1),
              *c = Lane<float>::read(wave, in, 3, r2);
  u64 scaled = wave.scalar64(VCC);
  u32 out[LANES];
  for (int l = 0; l < LANES; l++) {
    double r = fused_wide(a[l], b[l], c[l]);
    if (scaled >> l & 1) r *= (word(c[l]) >> 23 & 255) > 127 ? 18446744073709551616.0 : 1 / 18446744073709551616.0;
    out[l] = word(float(r));
  }
  commit_row(wave, in, 0, out, false);
}

// v_div_fixup_f32 quotient, denominator, numerator: the special cases of a division.
static float fix_quotient(float q, float d, float n) {
  u32 sign = (word(d) ^ word(n)) & 0x80000000;
  if (n != n) return real(word(n) | 0x400000);
  if (d != d) return real(word(d) | 0x400000);
  if ((n == 0 && d == 0) || (isinf(n) && isinf(d))) return real(0xffc00000);
  if (d == 0 || isinf(n)) return real(sign | 0x7f800000);
  if (isinf(d) || n == 0) return real(sign);
  int n_exponent, d_exponent;
  frexp(double(n), &n_exponent);
  frexp(double(d), &d_exponent);
  // Out of range by the exponents alone: the refinement may have made a NaN of it.
  if (n_exponent - d_exponent < -150) return real(sign);
  if (n_exponent - d_exponent > 129) return real(sign | 0x7f800000);
  return real((word(q) & 0x7fffffff) | sign);
}

static void count_bits_below(Wave& wave, const Inst& in) {
  u32 ra[LANES], rb[LANES], out[LANES];
  const u32 *a = source_row(wave, in, 1, ra), *b = source_row(wave, in, 2, rb);
  bool high = in.opcode->aux;
  for (int l = 0; l < LANES; l++) {
    u64 below = (1ull << l) - 1;
    out[l] = u32(__builtin_popcount(a[l] & u32(high ? below >> 32 : below))) + b[l];
  }
  commit_row(wave, in, 0, out, false);
}

static const char* two_destinations(Inst& in) {
  in.source = 2;
  return nullptr;
}

static const Opcode entries[] = {
    {"v_cndmask_b32", conditional_mask, VALU, ANY_ARCH, 0, nullptr},
    {"v_bitop3_b32", bit_function, VALU, GFX950, 0, nullptr},
    {"v_bitop3_b16", bit_function_16, VALU, GFX950, PRESERVES_HIGH, nullptr},
    {"v_div_scale_f32", divide_scale, VALU, ANY_ARCH, 0, two_destinations},
    {"v_div_fmas_f32", divide_fmas, VALU, ANY_ARCH, 0, nullptr},
    vector("v_div_fixup_f32", [](float q, float d, float n) { return fix_quotient(q, d, n); }),
    {"v_mbcnt_lo_u32_b32", count_bits_below, VALU, ANY_ARCH, 0, nullptr},
    {"v_mbcnt_hi_u32_b32", count_bits_below, VALU, ANY_ARCH, 1, nullptr},
};
extern const Table select_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
