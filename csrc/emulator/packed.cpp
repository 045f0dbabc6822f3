// Packed instructions: the same function on two f32 of a register pair, or on two 16-bit halves of a register.
#include "vector.hpp"

namespace emulator {

struct Half16 {
  i32 value;
};  // a 16-bit integer half, sign-extended
struct Word16 {
  u32 value;
};  // a 16-bit integer half, zero-extended

static bool picks_high(const Inst& in, int k, bool high) {
  int bit = k - 1;
  i64 mask = high ? (in.mod[mod_has_op_sel_hi] ? in.mod[mod_op_sel_hi] : 7) : in.mod[mod_op_sel];
  return mask >> bit & 1;
}
static bool negates(const Inst& in, int k, bool high) { return in.mod[high ? mod_neg_hi : mod_neg_lo] >> (k - 1) & 1; }

// One f32 half of source k; a constant serves both halves.
static void read_half_f32(Wave& wave, const Inst& in, int k, bool high, float* out) {
  const Operand& op = in.op[k];
  int at = picks_high(in, k, high) ? 1 : 0;
  u32 flip = negates(in, k, high) ? 0x80000000 : 0;
  for (int l = 0; l < LANES; l++) {
    u32 x = op.kind == VECTOR ? wave.v[op.index + at][l] : op.kind == SCALAR ? wave.s[op.index + at] : u32(op.literal);
    float f = real(x ^ flip);
    out[l] = wave.flush32 ? flush(f) : f;
  }
}

template <class F, int SOURCES>
static void packed_f32(Wave& wave, const Inst& in) {
  float a[LANES], b[LANES], c[LANES] = {};
  u32 out[2][LANES];
  for (int high = 0; high < 2; high++) {
    read_half_f32(wave, in, 1, high, a);
    read_half_f32(wave, in, 2, high, b);
    if (SOURCES == 3) read_half_f32(wave, in, 3, high, c);
    for (int l = 0; l < LANES; l++) {
      float r = stateless<F>()(a[l], b[l], c[l]);
      out[high][l] = word(wave.flush32 ? flush(r) : r);
    }
  }
  commit_row(wave, in, 0, out[0], true);
  commit_row(wave, in, 1, out[1], true);
}

// v_pk_mov_b32: op_sel picks the word of the first source for the low result, and of the second for the high one.
static void packed_mov(Wave& wave, const Inst& in) {
  u32 out[2][LANES];
  for (int high = 0; high < 2; high++) {
    const Operand& op = in.op[1 + high];
    int at = in.mod[mod_op_sel] >> high & 1;
    for (int l = 0; l < LANES; l++)
      out[high][l] = op.kind == VECTOR   ? wave.v[op.index + at][l]
                     : op.kind == SCALAR ? wave.s[op.index + at]
                                         : u32(op.literal);
  }
  commit_row(wave, in, 0, out[0], false);
  commit_row(wave, in, 1, out[1], false);
}

static u32 half_bits(Wave& wave, const Inst& in, int k, bool high, int lane) {
  const Operand& op = in.op[k];
  u32 x = op.kind == VECTOR ? wave.v[op.index][lane] : scalar(wave, op);
  if (op.flags & FLOAT_LITERAL)
    x = double_to_half(bit_cast<double>(op.wide));  // the constant is in the low half, zeros above
  return x >> (picks_high(in, k, high) ? 16 : 0) & 0xffff;
}
template <class T>
struct HalfLane;
template <>
struct HalfLane<Half> {
  static Half read(Wave& wave, const Inst& in, int k, bool high, int lane) {
    u32 h = half_bits(wave, in, k, high, lane) ^ (negates(in, k, high) ? 0x8000 : 0);
    return Half{half_to_float(flushed(wave, u16(h)))};
  }
  static u16 bits(Wave& wave, Half x) { return flushed(wave, float_to_half(x.value)); }
  static u16 flushed(Wave& wave, u16 h) { return wave.flush16 && !(h & 0x7c00) ? h & 0x8000 : h; }
};
template <>
struct HalfLane<Half16> {
  static Half16 read(Wave& wave, const Inst& in, int k, bool high, int lane) {
    return Half16{i16(half_bits(wave, in, k, high, lane))};
  }
  static u16 bits(Wave&, Half16 x) { return u16(x.value); }
};
template <>
struct HalfLane<Word16> {
  static Word16 read(Wave& wave, const Inst& in, int k, bool high, int lane) {
    return Word16{half_bits(wave, in, k, high, lane)};
  }
  static u16 bits(Wave&, Word16 x) { return u16(x.value); }
};

template <class F, class T, int SOURCES>
static void packed_16(Wave& wave, const Inst& in) {
  u32 out[LANES];
  for (int l = 0; l < LANES; l++) {
    u32 both = 0;
    for (int high = 0; high < 2; high++) {
      T a = HalfLane<T>::read(wave, in, 1, high, l), b = HalfLane<T>::read(wave, in, 2, high, l), c = {};
      if (SOURCES == 3) c = HalfLane<T>::read(wave, in, 3, high, l);
      both |= u32(HalfLane<T>::bits(wave, stateless<F>()(a, b, c))) << (16 * high);
    }
    out[l] = both;
  }
  commit_row(wave, in, 0, out, false);
}

template <class F>
constexpr Opcode pk32(const char* name, F) {
  return {name, &packed_f32<F, 2>, VALU, ANY_ARCH, 0, nullptr};
}
template <class F>
constexpr Opcode pk32_3(const char* name, F) {
  return {name, &packed_f32<F, 3>, VALU, ANY_ARCH, 0, nullptr};
}
template <class T, class F>
constexpr Opcode pk16(const char* name, F) {
  return {name, &packed_16<F, T, 2>, VALU, ANY_ARCH, 0, nullptr};
}
template <class T, class F>
constexpr Opcode pk16_3(const char* name, F) {
  return {name, &packed_16<F, T, 3>, VALU, ANY_ARCH, 0, nullptr};
}

template <class F>
constexpr Opcode pk16_950(const char* name, F) {
  return {name, &packed_16<F, Half, 3>, VALU, GFX950, 0, nullptr};
}

// NaN wins over numbers in these two.
static Half widest(Half a, Half b) {
  return a.value != a.value ? a : b.value != b.value ? b : Half{max_f32(a.value, b.value)};
}
static Half least(Half a, Half b) {
  return a.value != a.value ? a : b.value != b.value ? b : Half{min_f32(a.value, b.value)};
}
static Half fused_half(Half a, Half b, Half c) {
  return Half{half_to_float(double_to_half(double(a.value) * b.value + c.value))};
}

// v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: each source is an f32, or with op_sel_hi the half that op_sel picks.
enum Mixed { TO_F32, TO_LOW, TO_HIGH };
static void mixed_fma(Wave& wave, const Inst& in) {
  Mixed to = Mixed(in.opcode->aux);
  u32 out[LANES];
  for (int l = 0; l < LANES; l++) {
    float x[3];
    for (int k = 1; k <= 3; k++) {
      const Operand& op = in.op[k];
      u32 raw = op.kind == VECTOR ? wave.v[op.index][l] : scalar(wave, op);
      bool half = in.mod[mod_op_sel_hi] >> (k - 1) & 1;
      if (half && (op.flags & FLOAT_LITERAL)) raw = double_to_half(bit_cast<double>(op.wide));
      float f = half ? half_to_float(u16(raw >> (in.mod[mod_op_sel] >> (k - 1) & 1 ? 16 : 0))) : real(raw);
      if (op.flags & ABSOLUTE) f = fabsf(f);
      x[k - 1] = op.flags & NEGATE ? -f : f;
    }
    float r = fused(x[0], x[1], x[2]);
    u32 old = wave.v[in.op[0].index][l];
    if (in.mod[mod_clamp]) r = r > 0 ? (r < 1 ? r : 1.0f) : 0.0f;
    out[l] = to == TO_F32   ? word(r)
             : to == TO_LOW ? (old & 0xffff0000) | float_to_half(r)
                            : (old & 0xffff) | u32(float_to_half(r)) << 16;
  }
  commit_row(wave, in, 0, out, false);
}

static const Opcode entries[] = {
    pk32("v_pk_add_f32", [](float a, float b, float) { return a + b; }),
    pk32("v_pk_mul_f32", [](float a, float b, float) { return a * b; }),
    pk32_3("v_pk_fma_f32", [](float a, float b, float c) { return fused(a, b, c); }),
    {"v_pk_mov_b32", packed_mov, VALU, ANY_ARCH, 0, nullptr},
    {"v_fma_mix_f32", mixed_fma, VALU, ANY_ARCH, TO_F32, nullptr},
    {"v_fma_mixlo_f16", mixed_fma, VALU, ANY_ARCH, TO_LOW, nullptr},
    {"v_fma_mixhi_f16", mixed_fma, VALU, ANY_ARCH, TO_HIGH, nullptr},
    pk16<Half>("v_pk_add_f16", [](Half a, Half b, Half) { return Half{a.value + b.value}; }),
    pk16<Half>("v_pk_mul_f16", [](Half a, Half b, Half) { return Half{a.value * b.value}; }),
    pk16<Half>("v_pk_max_f16", [](Half a, Half b, Half) { return Half{max_f32(a.value, b.value)}; }),
    pk16<Half>("v_pk_min_f16", [](Half a, Half b, Half) { return Half{min_f32(a.value, b.value)}; }),
    pk16_950("v_pk_maximum3_f16", [](Half a, Half b, Half c) { return widest(widest(a, b), c); }),
    pk16_950("v_pk_minimum3_f16", [](Half a, Half b, Half c) { return least(least(a, b), c); }),
    pk16_3<Half>("v_pk_fma_f16", [](Half a, Half b, Half c) { return fused_half(a, b, c); }),
    pk16<Word16>("v_pk_add_u16", [](Word16 a, Word16 b, Word16) { return Word16{a.value + b.value}; }),
    pk16<Word16>("v_pk_add_i16", [](Word16 a, Word16 b, Word16) { return Word16{a.value + b.value}; }),
    pk16<Word16>("v_pk_sub_u16", [](Word16 a, Word16 b, Word16) { return Word16{a.value - b.value}; }),
    pk16<Word16>("v_pk_sub_i16", [](Word16 a, Word16 b, Word16) { return Word16{a.value - b.value}; }),
    pk16<Word16>("v_pk_mul_lo_u16", [](Word16 a, Word16 b, Word16) { return Word16{a.value * b.value}; }),
    pk16_3<Word16>("v_pk_mad_u16", [](Word16 a, Word16 b, Word16 c) { return Word16{a.value * b.value + c.value}; }),
    pk16_3<Word16>("v_pk_mad_i16", [](Word16 a, Word16 b, Word16 c) { return Word16{a.value * b.value + c.value}; }),
    pk16<Word16>("v_pk_lshlrev_b16", [](Word16 a, Word16 b, Word16) { return Word16{b.value << (a.value & 15)}; }),
    pk16<Word16>("v_pk_lshrrev_b16", [](Word16 a, Word16 b, Word16) { return Word16{b.value >> (a.value & 15)}; }),
    pk16<Half16>("v_pk_ashrrev_i16", [](Half16 a, Half16 b, Half16) { return Half16{b.value >> (a.value & 15)}; }),
    pk16<Half16>("v_pk_max_i16", [](Half16 a, Half16 b, Half16) { return a.value > b.value ? a : b; }),
    pk16<Half16>("v_pk_min_i16", [](Half16 a, Half16 b, Half16) { return a.value < b.value ? a : b; }),
    pk16<Word16>("v_pk_max_u16", [](Word16 a, Word16 b, Word16) { return a.value > b.value ? a : b; }),
    pk16<Word16>("v_pk_min_u16", [](Word16 a, Word16 b, Word16) { return a.value < b.value ? a : b; }),
};
extern const Table packed_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
