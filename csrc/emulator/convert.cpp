// Conversions between number formats.
#include "narrow.hpp"
#include "vector.hpp"

namespace emulator {

static u32 to_unsigned(double x) { return x != x || x <= 0 ? 0 : x >= 4294967295.0 ? ~0u : u32(x); }
static i32 to_signed(double x) {
  return x != x ? 0 : x <= -2147483648.0 ? i32(0x80000000) : x >= 2147483647.0 ? 0x7fffffff : i32(x);
}
static i32 to_signed16(float x) { return x != x ? 0 : x <= -32768 ? -32768 : x >= 32767 ? 32767 : i32(x); }
static u32 to_unsigned16(float x) { return x != x || x <= 0 ? 0 : x >= 65535 ? 65535 : u32(x); }
static i32 normalised16(float x) {
  return x != x ? 0 : i32(rintf((x < -1 ? -1.0f : x > 1 ? 1.0f : x) * 32767.0f)) & 0xffff;
}

static float narrow_table[NARROW_FORMATS][256];
__attribute__((constructor)) static void fill_narrow_table() {
  for (int f = 0; f < NARROW_FORMATS; f++)
    for (int code = 0; code < 256; code++) narrow_table[f][code] = narrow_to_float(Narrow(f), u32(code));
}
const float* narrow_values(Narrow format) { return narrow_table[format]; }
Narrow eight_bit(const Inst& in, bool e5m2) {
  bool fnuz = in.arch == GFX942;
  return e5m2 ? (fnuz ? E5M2_FNUZ : E5M2) : (fnuz ? E4M3_FNUZ : E4M3);
}

constexpr i64 IS_E5M2 = 1;

static void from_narrow(Wave& wave, const Inst& in) {
  u32 room[LANES], out[LANES];
  const u32* a = source_row(wave, in, 1, room);
  const float* table = narrow_values(eight_bit(in, in.opcode->aux & IS_E5M2));
  for (int l = 0; l < LANES; l++) out[l] = word(table[a[l] & 255]);  // SDWA has already moved the chosen byte down
  commit_row(wave, in, 0, out, false);
}

// SDWA's word select has already moved the chosen half down; op_sel does it here.
static void from_narrow_pair(Wave& wave, const Inst& in) {
  u32 room[LANES], low[LANES], high[LANES];
  const u32* a = source_row(wave, in, 1, room);
  const float* table = narrow_values(eight_bit(in, in.opcode->aux & IS_E5M2));
  int shift = in.mod[mod_op_sel] & 1 ? 16 : 0;
  for (int l = 0; l < LANES; l++) {
    low[l] = word(table[a[l] >> shift & 255]);
    high[l] = word(table[a[l] >> (shift + 8) & 255]);
  }
  // The destination is a pair of words: SDWA's destination select does not apply to it.
  Inst whole = in;
  whole.mod[mod_sdwa] = 0;
  commit_row(wave, whole, 0, low, false);
  commit_row(wave, whole, 1, high, false);
}

static void to_narrow_pair(Wave& wave, const Inst& in) {
  float room_a[LANES], room_b[LANES];
  const float *a = Lane<float>::read(wave, in, 1, room_a), *b = Lane<float>::read(wave, in, 2, room_b);
  Narrow format = eight_bit(in, in.opcode->aux & IS_E5M2);
  bool saturate = wave.mode >> 23 & 1;
  u32 out[LANES];
  int shift = in.mod[mod_op_sel] >> 2 & 1 ? 16 : 0;
  for (int l = 0; l < LANES; l++) {
    u32 pair = float_to_narrow(format, a[l], saturate) | float_to_narrow(format, b[l], saturate) << 8;
    out[l] = (wave.v[in.op[0].index][l] & ~(0xffffu << shift)) | pair << shift;
  }
  commit_row(wave, in, 0, out, false);
}

static float ubyte(u32 x, int i) { return float(x >> (8 * i) & 255); }

static const Opcode entries[] = {
    vector("v_cvt_f32_u32", [](u32 a) { return float(a); }),
    vector("v_cvt_f32_i32", [](i32 a) { return float(a); }),
    vector("v_cvt_u32_f32", [](float a) { return to_unsigned(a); }),
    vector("v_cvt_i32_f32", [](float a) { return to_signed(a); }),
    vector("v_cvt_flr_i32_f32", [](float a) { return to_signed(floor(double(a))); }),
    vector("v_cvt_rpi_i32_f32", [](float a) { return to_signed(floor(double(a) + 0.5)); }),
    vector("v_cvt_f32_ubyte0", [](u32 a) { return ubyte(a, 0); }),
    vector("v_cvt_f32_ubyte1", [](u32 a) { return ubyte(a, 1); }),
    vector("v_cvt_f32_ubyte2", [](u32 a) { return ubyte(a, 2); }),
    vector("v_cvt_f32_ubyte3", [](u32 a) { return ubyte(a, 3); }),
    vector("v_cvt_f32_f16", [](Half a) { return a.value; }),
    vector("v_cvt_f16_f32", [](float a) { return Half{a}; }),
    vector("v_cvt_f16_u16", [](u32 a) { return Half{float(a & 0xffff)}; }),
    vector("v_cvt_f16_i16", [](u32 a) { return Half{float(i16(a))}; }),
    vector("v_cvt_u16_f16", [](Half a) { return to_unsigned16(a.value); }),
    vector("v_cvt_i16_f16", [](Half a) { return u32(to_signed16(a.value)) & 0xffff; }),
    vector("v_cvt_f64_f32", [](float a) { return double(a); }),
    vector("v_cvt_f32_f64", [](double a) { return float(a); }),
    vector("v_cvt_f64_i32", [](i32 a) { return double(a); }),
    vector("v_cvt_f64_u32", [](u32 a) { return double(a); }),
    vector("v_cvt_i32_f64", [](double a) { return to_signed(a); }),
    vector("v_cvt_u32_f64", [](double a) { return to_unsigned(a); }),
    vector(
        "v_cvt_pkrtz_f16_f32",
        [](float a, float b) { return u32(float_to_half_toward_zero(a)) | u32(float_to_half_toward_zero(b)) << 16; }),
    vector("v_cvt_pknorm_i16_f32", [](float a, float b) { return u32(normalised16(a)) | u32(normalised16(b)) << 16; }),
    vector(
        "v_cvt_pk_f16_f32", [](float a, float b) { return u32(float_to_half(a)) | u32(float_to_half(b)) << 16; }, VALU,
        GFX950),
    vector(
        "v_cvt_pk_bf16_f32", [](float a, float b) { return u32(float_to_bf16(a)) | u32(float_to_bf16(b)) << 16; }, VALU,
        GFX950),
    vector(
        "v_cvt_f32_bf16", [](u32 a) { return bf16_to_float(u16(a)); }, VALU, GFX950),
    vector("v_pack_b32_f16",
           [](Half a, Half b) { return u32(float_to_half(a.value)) | u32(float_to_half(b.value)) << 16; }),
    {"v_cvt_f32_fp8", from_narrow, VALU, ANY_ARCH, 0, nullptr},
    {"v_cvt_f32_bf8", from_narrow, VALU, ANY_ARCH, IS_E5M2, nullptr},
    {"v_cvt_pk_f32_fp8", from_narrow_pair, VALU, ANY_ARCH, 0, nullptr},
    {"v_cvt_pk_f32_bf8", from_narrow_pair, VALU, ANY_ARCH, IS_E5M2, nullptr},
    {"v_cvt_pk_fp8_f32", to_narrow_pair, VALU, ANY_ARCH, 0, nullptr},
    {"v_cvt_pk_bf8_f32", to_narrow_pair, VALU, ANY_ARCH, IS_E5M2, nullptr},
};
extern const Table convert_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
