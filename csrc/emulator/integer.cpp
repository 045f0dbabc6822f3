// 32-bit and 16-bit integer instructions of the vector unit.
#include "vector.hpp"

namespace emulator {

static u32 byte_of(u64 pair, u32 select) {
  if (select >= 13) return 0xff;
  if (select == 12) return 0;
  if (select >= 8) return (pair >> (16 * (select - 8) + 15) & 1) ? 0xff : 0;
  return u32(pair >> (8 * select) & 0xff);
}
static u32 permute_bytes(u32 a, u32 b, u32 select) {
  u64 pair = u64(a) << 32 | b;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= byte_of(pair, select >> (8 * i) & 255) << (8 * i);
  return r;
}
static u32 reverse_bits(u32 x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(x);
}
static u32 extract(u32 a, u32 at, u32 width) { return (a >> (at & 31)) & ((1u << (width & 31)) - 1); }
static i32 extract_signed(i32 a, u32 at, u32 width) {
  width &= 31, at &= 31;
  if (!width) return 0;
  return i32(u32(i64(a) >> at) << (32 - width)) >> (32 - width);
}
static i32 signed24(u32 x) { return i32(x << 8) >> 8; }
static u32 absolute_difference(u32 a, u32 b) { return a > b ? a - b : b - a; }
static u32 dot4_signed(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 32; i += 8) c += u32(i32(i8(a >> i)) * i32(i8(b >> i)));
  return c;
}
static u32 dot4_unsigned(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}
static i32 clamp16(i32 x) { return x < -32768 ? -32768 : x > 32767 ? 32767 : x; }

// Unsigned sums and differences with clamp; aux selects one.
enum { SUM, DIFFERENCE, REVERSED };
static void saturating(Wave& wave, const Inst& in) {
  u32 ra[LANES], rb[LANES], out[LANES];
  const u32 *a = source_row(wave, in, 1, ra), *b = source_row(wave, in, 2, rb);
  for (int l = 0; l < LANES; l++) {
    u32 x = in.opcode->aux == REVERSED ? b[l] : a[l], y = in.opcode->aux == REVERSED ? a[l] : b[l];
    if (in.opcode->aux == SUM)
      out[l] = x + y < x ? ~0u : x + y;
    else
      out[l] = x > y ? x - y : 0;
  }
  commit_row(wave, in, 0, out, false);
}
static const char* saturate_if_clamped(Inst& in) {
  if (in.mod[mod_clamp]) in.run = saturating;
  return nullptr;
}
template <class F>
constexpr Opcode may_saturate(const char* name, F function, i64 which) {
  Opcode opcode = vector(name, function);
  opcode.aux = which;
  opcode.prepare = saturate_if_clamped;
  return opcode;
}

static const Opcode entries[] = {
    vector("v_mov_b32", [](u32 a) { return a; }),
    vector("v_accvgpr_read_b32", [](u32 a) { return a; }),
    vector("v_accvgpr_write_b32", [](u32 a) { return a; }),
    vector("v_accvgpr_mov_b32", [](u32 a) { return a; }),
    vector("v_not_b32", [](u32 a) { return ~a; }),
    vector("v_bfrev_b32", [](u32 a) { return reverse_bits(a); }),
    vector("v_ffbh_u32", [](u32 a) { return a ? u32(__builtin_clz(a)) : ~0u; }),
    vector("v_ffbl_b32", [](u32 a) { return a ? u32(__builtin_ctz(a)) : ~0u; }),
    vector("v_ffbh_i32",
           [](i32 a) {
             u32 x = u32(a < 0 ? ~a : a);
             return x ? u32(__builtin_clz(x)) : ~0u;
           }),
    may_saturate("v_add_u32", [](u32 a, u32 b) { return a + b; }, SUM),
    may_saturate("v_sub_u32", [](u32 a, u32 b) { return a - b; }, DIFFERENCE),
    may_saturate("v_subrev_u32", [](u32 a, u32 b) { return b - a; }, REVERSED),
    vector("v_add_i32", [](u32 a, u32 b) { return a + b; }),
    vector("v_sub_i32", [](u32 a, u32 b) { return a - b; }),
    vector("v_and_b32", [](u32 a, u32 b) { return a & b; }),
    vector("v_or_b32", [](u32 a, u32 b) { return a | b; }),
    vector("v_xor_b32", [](u32 a, u32 b) { return a ^ b; }),
    vector("v_xnor_b32", [](u32 a, u32 b) { return ~(a ^ b); }),
    vector("v_lshlrev_b32", [](u32 a, u32 b) { return b << (a & 31); }),
    vector("v_lshrrev_b32", [](u32 a, u32 b) { return b >> (a & 31); }),
    vector("v_ashrrev_i32", [](u32 a, i32 b) { return b >> (a & 31); }),
    vector("v_min_u32", [](u32 a, u32 b) { return a < b ? a : b; }),
    vector("v_max_u32", [](u32 a, u32 b) { return a > b ? a : b; }),
    vector("v_min_i32", [](i32 a, i32 b) { return a < b ? a : b; }),
    vector("v_max_i32", [](i32 a, i32 b) { return a > b ? a : b; }),
    vector("v_min3_u32",
           [](u32 a, u32 b, u32 c) {
             u32 m = a < b ? a : b;
             return m < c ? m : c;
           }),
    vector("v_max3_u32",
           [](u32 a, u32 b, u32 c) {
             u32 m = a > b ? a : b;
             return m > c ? m : c;
           }),
    vector("v_min3_i32",
           [](i32 a, i32 b, i32 c) {
             i32 m = a < b ? a : b;
             return m < c ? m : c;
           }),
    vector("v_max3_i32",
           [](i32 a, i32 b, i32 c) {
             i32 m = a > b ? a : b;
             return m > c ? m : c;
           }),
    vector("v_med3_i32",
           [](i32 a, i32 b, i32 c) {
             i32 l = a < b ? a : b, h = a < b ? b : a;
             return c < l ? l : c > h ? h : c;
           }),
    vector("v_med3_u32",
           [](u32 a, u32 b, u32 c) {
             u32 l = a < b ? a : b, h = a < b ? b : a;
             return c < l ? l : c > h ? h : c;
           }),
    vector("v_lshl_add_u32", [](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }),
    vector("v_add_lshl_u32", [](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }),
    vector("v_lshl_or_b32", [](u32 a, u32 b, u32 c) { return a << (b & 31) | c; }),
    vector("v_and_or_b32", [](u32 a, u32 b, u32 c) { return (a & b) | c; }),
    vector("v_or3_b32", [](u32 a, u32 b, u32 c) { return a | b | c; }),
    vector("v_add3_u32", [](u32 a, u32 b, u32 c) { return a + b + c; }),
    vector("v_xad_u32", [](u32 a, u32 b, u32 c) { return (a ^ b) + c; }),
    vector("v_bfe_u32", [](u32 a, u32 b, u32 c) { return extract(a, b, c); }),
    vector("v_bfe_i32", [](i32 a, u32 b, u32 c) { return extract_signed(a, b, c); }),
    vector("v_bfi_b32", [](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); }),
    vector("v_bfm_b32", [](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }),
    vector("v_alignbit_b32", [](u32 a, u32 b, u32 c) { return u32((u64(a) << 32 | b) >> (c & 31)); }),
    vector("v_alignbyte_b32", [](u32 a, u32 b, u32 c) { return u32((u64(a) << 32 | b) >> (8 * (c & 3))); }),
    vector("v_perm_b32", [](u32 a, u32 b, u32 c) { return permute_bytes(a, b, c); }),
    vector("v_bcnt_u32_b32", [](u32 a, u32 b) { return u32(__builtin_popcount(a)) + b; }),
    vector("v_mul_lo_u32", [](u32 a, u32 b) { return a * b; }),
    vector("v_mul_hi_u32", [](u32 a, u32 b) { return u32(u64(a) * b >> 32); }),
    vector("v_mul_hi_i32", [](i32 a, i32 b) { return i32(i64(a) * b >> 32); }),
    vector("v_mul_u32_u24", [](u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); }),
    vector("v_mul_hi_u32_u24", [](u32 a, u32 b) { return u32(u64(a & 0xffffff) * (b & 0xffffff) >> 32); }),
    vector("v_mul_i32_i24", [](u32 a, u32 b) { return u32(i64(signed24(a)) * signed24(b)); }),
    vector("v_mul_hi_i32_i24", [](u32 a, u32 b) { return i32(i64(signed24(a)) * signed24(b) >> 32); }),
    vector("v_mad_u32_u24", [](u32 a, u32 b, u32 c) { return (a & 0xffffff) * (b & 0xffffff) + c; }),
    vector("v_mad_i32_i24", [](u32 a, u32 b, u32 c) { return u32(i64(signed24(a)) * signed24(b)) + c; }),
    vector("v_mad_u32_u16", [](u32 a, u32 b, u32 c) { return (a & 0xffff) * (b & 0xffff) + c; }),
    vector("v_mad_i32_i16", [](u32 a, u32 b, u32 c) { return u32(i32(i16(a)) * i32(i16(b))) + c; }),
    vector("v_sad_u32", [](u32 a, u32 b, u32 c) { return absolute_difference(a, b) + c; }),
    vector("v_dot4_i32_i8", [](u32 a, u32 b, u32 c) { return dot4_signed(a, b, c); }),
    vector("v_dot4_u32_u8", [](u32 a, u32 b, u32 c) { return dot4_unsigned(a, b, c); }),
    vector("v_add_u16", [](u32 a, u32 b) { return (a + b) & 0xffff; }),
    vector("v_sub_u16", [](u32 a, u32 b) { return (a - b) & 0xffff; }),
    vector("v_subrev_u16", [](u32 a, u32 b) { return (b - a) & 0xffff; }),
    vector("v_mul_lo_u16", [](u32 a, u32 b) { return (a * b) & 0xffff; }),
    vector("v_lshlrev_b16", [](u32 a, u32 b) { return (b << (a & 15)) & 0xffff; }),
    vector("v_lshrrev_b16", [](u32 a, u32 b) { return (b & 0xffff) >> (a & 15); }),
    vector("v_ashrrev_i16", [](u32 a, u32 b) { return u32(i32(i16(b)) >> (a & 15)) & 0xffff; }),
    vector("v_max_u16",
           [](u32 a, u32 b) {
             a &= 0xffff, b &= 0xffff;
             return a > b ? a : b;
           }),
    vector("v_min_u16",
           [](u32 a, u32 b) {
             a &= 0xffff, b &= 0xffff;
             return a < b ? a : b;
           }),
    vector("v_max_i16", [](u32 a, u32 b) { return u32(i16(a) > i16(b) ? a : b) & 0xffff; }),
    vector("v_min_i16", [](u32 a, u32 b) { return u32(i16(a) < i16(b) ? a : b) & 0xffff; }),
    vector("v_cvt_pk_u16_u32",
           [](u32 a, u32 b) { return (a > 0xffff ? 0xffff : a) | (b > 0xffff ? 0xffff : b) << 16; }),
    vector("v_cvt_pk_i16_i32", [](i32 a, i32 b) { return (u32(clamp16(a)) & 0xffff) | u32(clamp16(b)) << 16; }),
};
extern const Table integer_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
