// gfx950's scaled conversions. The scale operand is an f32 of which only the exponent counts: narrow to wide multiplies
// by 2^(exponent - 127), wide to narrow divides by it. All round to nearest even once and saturate.
#include "narrow.hpp"
#include "vector.hpp"

namespace emulator {

static double power_of(u32 scale) {
  u32 e = scale >> 23 & 255;
  return e == 255 ? double(real(0x7fc00000)) : ldexp(1.0, int(e) - 127);
}

// aux: narrow format | wide type << 8 | elements << 16
enum Wide { WIDE_F32, WIDE_F16, WIDE_BF16 };
constexpr i64 shape(Narrow narrow, Wide wide, int elements) {
  return i64(narrow) | i64(wide) << 8 | i64(elements) << 16;
}

static u32 pack_wide(Wide wide, double x) {
  return wide == WIDE_F32 ? word(float(x)) : wide == WIDE_F16 ? double_to_half(x) : float_to_bf16(float(x));
}
static double unpack_wide(Wide wide, u32 x) {
  return wide == WIDE_F32 ? real(x) : wide == WIDE_F16 ? half_to_float(u16(x)) : bf16_to_float(u16(x));
}
static int width_of(Narrow narrow) { return 1 + NARROW[narrow].exponent_bits + NARROW[narrow].mantissa_bits; }

// Bits [at, at + width) of consecutive registers.
static u32 field(const u32 (*rows)[LANES], int lane, int at, int width) {
  u64 pair = rows[at / 32][lane];
  if (at % 32 + width > 32) pair |= u64(rows[at / 32 + 1][lane]) << 32;
  return u32(pair >> (at % 32)) & ((1u << width) - 1);
}

// v_cvt_scalef32_pk{,8,16,32}_{f32,f16,bf16}_{fp8,bf8,fp4,fp6,bf6} d, narrow, scale. For pairs op_sel picks which part
// of the source register.
static void widen(Wave& wave, const Inst& in) {
  Narrow narrow = Narrow(in.opcode->aux & 255);
  Wide wide = Wide(in.opcode->aux >> 8 & 255);
  int elements = int(in.opcode->aux >> 16), width = width_of(narrow);
  int low = in.mod[mod_op_sel] & 1, high = in.mod[mod_op_sel] >> 1 & 1, start = 0;
  if (elements * width == 16)
    start = 16 * low;  // a pair of bytes: which half
  else if (elements * width == 8)
    start = 8 * low + 16 * high;  // one byte, or a pair of nibbles: which byte
  u32 source[8][LANES], room[LANES], out[32][LANES] = {};
  int words = (start + elements * width + 31) / 32;
  for (int w = 0; w < words; w++)
    for (int l = 0; l < LANES; l++)
      source[w][l] = in.op[1].kind == VECTOR ? wave.v[in.op[1].index + w][l] : scalar(wave, in.op[1]);
  const u32* scale = source_row(wave, in, 2, room);
  const float* table = narrow_values(narrow);
  for (int l = 0; l < LANES; l++) {
    double factor = power_of(scale[l]);
    for (int e = 0; e < elements; e++) {
      u32 r = pack_wide(wide, double(table[field(source, l, start + e * width, width)]) * factor);
      if (wide == WIDE_F32)
        out[e][l] = r;
      else
        out[e / 2][l] |= r << (16 * (e % 2));
    }
  }
  int results = wide == WIDE_F32 ? elements : (elements + 1) / 2;
  for (int r = 0; r < results; r++) commit_row(wave, in, r, out[r], false);
}

// v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,f16,bf16}: two f32 sources or one packed source, then the scale; the part of the
// destination that op_sel does not pick is kept.
static void narrow_pair(Wave& wave, const Inst& in) {
  Narrow narrow = Narrow(in.opcode->aux & 255);
  Wide wide = Wide(in.opcode->aux >> 8 & 255);
  int width = width_of(narrow), sources = wide == WIDE_F32 ? 2 : 1;
  u32 ra[LANES], rb[LANES], rs[LANES], out[LANES];
  const u32 *a = Lane<u32>::read(wave, in, 1, ra), *b = sources == 2 ? Lane<u32>::read(wave, in, 2, rb) : a;
  const u32* scale = source_row(wave, in, 1 + sources, rs);
  i64 select = in.mod[mod_op_sel];
  int shift =
      width == 8 ? (select >> 3 & 1 || select >> 2 & 1 ? 16 : 0) : int((select >> 2 & 1) * 8 + (select >> 3 & 1) * 16);
  u32 mask = ((1u << (2 * width)) - 1) << shift;
  for (int l = 0; l < LANES; l++) {
    double factor = power_of(scale[l]);
    double low = unpack_wide(wide, a[l]), high = sources == 2 ? unpack_wide(wide, b[l]) : unpack_wide(wide, a[l] >> 16);
    u32 pair = float_to_narrow(narrow, low / factor, true) | float_to_narrow(narrow, high / factor, true) << width;
    out[l] = (wave.v[in.op[0].index][l] & ~mask) | pair << shift;
  }
  commit_row(wave, in, 0, out, false);
}

#define WIDEN(name, narrow, wide, elements) {name, widen, VALU, GFX950, shape(narrow, wide, elements), nullptr}
#define NARROW_PAIR(name, narrow, wide) {name, narrow_pair, VALU, GFX950, shape(narrow, wide, 2), nullptr}
static const Opcode entries[] = {
    WIDEN("v_cvt_scalef32_f32_fp8", E4M3, WIDE_F32, 1),
    WIDEN("v_cvt_scalef32_f32_bf8", E5M2, WIDE_F32, 1),
    WIDEN("v_cvt_scalef32_pk_f32_fp8", E4M3, WIDE_F32, 2),
    WIDEN("v_cvt_scalef32_pk_f32_bf8", E5M2, WIDE_F32, 2),
    WIDEN("v_cvt_scalef32_pk_f32_fp4", E2M1, WIDE_F32, 2),
    WIDEN("v_cvt_scalef32_pk_f16_fp8", E4M3, WIDE_F16, 2),
    WIDEN("v_cvt_scalef32_pk_f16_bf8", E5M2, WIDE_F16, 2),
    WIDEN("v_cvt_scalef32_pk_f16_fp4", E2M1, WIDE_F16, 2),
    WIDEN("v_cvt_scalef32_pk_bf16_fp8", E4M3, WIDE_BF16, 2),
    WIDEN("v_cvt_scalef32_pk_bf16_bf8", E5M2, WIDE_BF16, 2),
    WIDEN("v_cvt_scalef32_pk_bf16_fp4", E2M1, WIDE_BF16, 2),
    WIDEN("v_cvt_scalef32_pk32_f32_fp6", E2M3, WIDE_F32, 32),
    WIDEN("v_cvt_scalef32_pk32_f32_bf6", E3M2, WIDE_F32, 32),
    WIDEN("v_cvt_scalef32_pk32_f16_fp6", E2M3, WIDE_F16, 32),
    WIDEN("v_cvt_scalef32_pk32_f16_bf6", E3M2, WIDE_F16, 32),
    WIDEN("v_cvt_scalef32_pk32_bf16_fp6", E2M3, WIDE_BF16, 32),
    WIDEN("v_cvt_scalef32_pk32_bf16_bf6", E3M2, WIDE_BF16, 32),
    NARROW_PAIR("v_cvt_scalef32_pk_fp8_f32", E4M3, WIDE_F32),
    NARROW_PAIR("v_cvt_scalef32_pk_bf8_f32", E5M2, WIDE_F32),
    NARROW_PAIR("v_cvt_scalef32_pk_fp4_f32", E2M1, WIDE_F32),
    NARROW_PAIR("v_cvt_scalef32_pk_fp8_f16", E4M3, WIDE_F16),
    NARROW_PAIR("v_cvt_scalef32_pk_bf8_f16", E5M2, WIDE_F16),
    NARROW_PAIR("v_cvt_scalef32_pk_fp4_f16", E2M1, WIDE_F16),
    NARROW_PAIR("v_cvt_scalef32_pk_fp8_bf16", E4M3, WIDE_BF16),
    NARROW_PAIR("v_cvt_scalef32_pk_bf8_bf16", E5M2, WIDE_BF16),
    NARROW_PAIR("v_cvt_scalef32_pk_fp4_bf16", E2M1, WIDE_BF16),
};
extern const Table scaled_convert_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
