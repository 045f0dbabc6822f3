// The scalar unit. A lambda whose first parameter is `bool&` reads or writes SCC.
#include "numbers.hpp"
#include "wave.hpp"

namespace emulator {

template <class T>
inline T scalar_read(Wave& wave, const Operand& op) {
  if (sizeof(T) == 8) return T(scalar64(wave, op));
  return T(scalar(wave, op));
}
template <class T>
inline void scalar_write(Wave& wave, const Operand& op, T value) {
  if (sizeof(T) == 8)
    wave.set_scalar64(op.index, u64(value));
  else
    wave.set_scalar(op.index, u32(value));
}

template <class F, class R, class... A>
struct Scalar;

template <class F>
inline F& callable() {
  static char storage[sizeof(F)];
  return *reinterpret_cast<F*>(storage);
}
template <class F, class R, class A>
struct Scalar<F, R, bool&, A> {
  static void run(Wave& wave, const Inst& in) {
    scalar_write<R>(wave, in.op[0], callable<F>()(wave.scc, scalar_read<A>(wave, in.op[1])));
  }
};
template <class F, class R, class A, class B>
struct Scalar<F, R, bool&, A, B> {
  static void run(Wave& wave, const Inst& in) {
    scalar_write<R>(wave, in.op[0],
                    callable<F>()(wave.scc, scalar_read<A>(wave, in.op[1]), scalar_read<B>(wave, in.op[2])));
  }
};
template <class F>
struct ScalarSignature : ScalarSignature<decltype(&F::operator())> {};
template <class F, class R, class... A>
struct ScalarSignature<R (F::*)(A...) const> {
  using Runner = Scalar<F, R, A...>;
};

template <class F>
constexpr Opcode salu(const char* name, F, const char* (*prepare)(Inst&) = nullptr) {
  return {name, &ScalarSignature<F>::Runner::run, SALU, ANY_ARCH, 0, prepare};
}

// s_addk_i32 and its kin read their destination and a signed 16-bit constant.
static const char* constant_16(Inst& in) {
  in.op[2] = in.op[1];
  in.op[1] = in.op[0];
  in.op[2].literal = u32(i32(i16(in.op[2].literal)));
  in.operands = 3;
  return nullptr;
}
static const char* move_16(Inst& in) {
  in.op[1].literal = u32(i32(i16(in.op[1].literal)));
  return nullptr;
}
static const char* keep_destination(Inst& in) {  // s_cmov: the third operand is the old value
  in.op[2] = in.op[0];
  return nullptr;
}

template <class T>
static T nonzero(bool& scc, T r) {
  scc = r != 0;
  return r;
}
static u32 add(bool& scc, u32 a, u32 b, u32 carry) {
  u64 r = u64(a) + b + carry;
  scc = r >> 32;
  return u32(r);
}
static u32 subtract(bool& scc, u32 a, u32 b, u32 borrow) {
  scc = u64(b) + borrow > a;
  return a - b - borrow;
}
static u32 shift_add(bool& scc, u32 a, u32 b, int n) {
  u64 r = (u64(a) << n) + b;
  scc = r >> 32;
  return u32(r);
}
static u64 field(u64 a, u32 b, int limit) {
  u32 at = b & (limit - 1), width = b >> 16 & 127;
  a >>= at;
  return width >= 64 ? a : a & ((1ull << width) - 1);
}
static i64 signed_field(i64 a, u32 b, int limit) {
  u32 at = b & (limit - 1), width = b >> 16 & 127;
  if (!width) return 0;
  if (width > u32(limit)) width = limit;
  a >>= at;
  return width >= 64 ? a : i64(u64(a) << (64 - width)) >> (64 - width);
}
static u64 reverse(u64 x, int bits) {
  u64 r = 0;
  for (int i = 0; i < bits; i++) r |= (x >> i & 1) << (bits - 1 - i);
  return r;
}
// EXEC-saving forms: D = EXEC, EXEC = f(source, EXEC), SCC = EXEC != 0.
template <class F>
static void save_exec(Wave& wave, const Inst& in) {
  u64 old = wave.exec, source = scalar64(wave, in.op[1]), r = callable<F>()(source, old);
  wave.set_scalar64(in.op[0].index, old);
  wave.set_exec(r);
  wave.scc = r != 0;
}
template <class F>
constexpr Opcode saveexec(const char* name, F) {
  return {name, &save_exec<F>, SALU, ANY_ARCH, 0, nullptr};
}

#define LOGIC(name, expression)                                                                  \
  salu("s_" name "_b32", [](bool& scc, u32 a, u32 b) { return nonzero<u32>(scc, expression); }), \
      salu("s_" name "_b64", [](bool& scc, u64 a, u64 b) { return nonzero<u64>(scc, expression); })

static const Opcode entries[] = {
    salu("s_mov_b32", [](bool&, u32 a) { return a; }),
    salu("s_mov_b64", [](bool&, u64 a) { return a; }),
    salu(
        "s_movk_i32", [](bool&, u32 a) { return a; }, move_16),
    salu(
        "s_cmov_b32", [](bool& scc, u32 a, u32 old) { return scc ? a : old; }, keep_destination),
    salu(
        "s_cmov_b64", [](bool& scc, u64 a, u64 old) { return scc ? a : old; }, keep_destination),
    salu("s_cselect_b32", [](bool& scc, u32 a, u32 b) { return scc ? a : b; }),
    salu("s_cselect_b64", [](bool& scc, u64 a, u64 b) { return scc ? a : b; }),
    salu("s_add_u32", [](bool& scc, u32 a, u32 b) { return add(scc, a, b, 0); }),
    salu("s_addc_u32", [](bool& scc, u32 a, u32 b) { return add(scc, a, b, scc); }),
    salu("s_sub_u32", [](bool& scc, u32 a, u32 b) { return subtract(scc, a, b, 0); }),
    salu("s_subb_u32", [](bool& scc, u32 a, u32 b) { return subtract(scc, a, b, scc); }),
    salu("s_add_i32",
         [](bool& scc, i32 a, i32 b) {
           i32 r;
           scc = __builtin_add_overflow(a, b, &r);
           return r;
         }),
    salu("s_sub_i32",
         [](bool& scc, i32 a, i32 b) {
           i32 r;
           scc = __builtin_sub_overflow(a, b, &r);
           return r;
         }),
    salu(
        "s_addk_i32",
        [](bool& scc, i32 a, i32 b) {
          i32 r;
          scc = __builtin_add_overflow(a, b, &r);
          return r;
        },
        constant_16),
    salu(
        "s_mulk_i32", [](bool&, u32 a, u32 b) { return a * b; }, constant_16),
    salu(
        "s_cmovk_i32", [](bool& scc, u32 old, u32 a) { return scc ? a : old; }, constant_16),
    salu("s_mul_i32", [](bool&, u32 a, u32 b) { return a * b; }),
    salu("s_mul_hi_u32", [](bool&, u32 a, u32 b) { return u32(u64(a) * b >> 32); }),
    salu("s_mul_hi_i32", [](bool&, i32 a, i32 b) { return u32(u64(i64(a) * b) >> 32); }),
    salu("s_min_i32",
         [](bool& scc, i32 a, i32 b) {
           scc = a < b;
           return scc ? a : b;
         }),
    salu("s_max_i32",
         [](bool& scc, i32 a, i32 b) {
           scc = a > b;
           return scc ? a : b;
         }),
    salu("s_min_u32",
         [](bool& scc, u32 a, u32 b) {
           scc = a < b;
           return scc ? a : b;
         }),
    salu("s_max_u32",
         [](bool& scc, u32 a, u32 b) {
           scc = a > b;
           return scc ? a : b;
         }),
    LOGIC("and", a& b),
    LOGIC("or", a | b),
    LOGIC("xor", a ^ b),
    LOGIC("andn2", a & ~b),
    LOGIC("orn2", a | ~b),
    LOGIC("nand", ~(a& b)),
    LOGIC("nor", ~(a | b)),
    LOGIC("xnor", ~(a ^ b)),
    salu("s_not_b32", [](bool& scc, u32 a) { return nonzero<u32>(scc, ~a); }),
    salu("s_not_b64", [](bool& scc, u64 a) { return nonzero<u64>(scc, ~a); }),
    salu("s_lshl_b32", [](bool& scc, u32 a, u32 b) { return nonzero<u32>(scc, a << (b & 31)); }),
    salu("s_lshl_b64", [](bool& scc, u64 a, u32 b) { return nonzero<u64>(scc, a << (b & 63)); }),
    salu("s_lshr_b32", [](bool& scc, u32 a, u32 b) { return nonzero<u32>(scc, a >> (b & 31)); }),
    salu("s_lshr_b64", [](bool& scc, u64 a, u32 b) { return nonzero<u64>(scc, a >> (b & 63)); }),
    salu("s_ashr_i32", [](bool& scc, i32 a, u32 b) { return nonzero<i32>(scc, a >> (b & 31)); }),
    salu("s_ashr_i64", [](bool& scc, i64 a, u32 b) { return nonzero<i64>(scc, a >> (b & 63)); }),
    salu("s_lshl1_add_u32", [](bool& scc, u32 a, u32 b) { return shift_add(scc, a, b, 1); }),
    salu("s_lshl2_add_u32", [](bool& scc, u32 a, u32 b) { return shift_add(scc, a, b, 2); }),
    salu("s_lshl3_add_u32", [](bool& scc, u32 a, u32 b) { return shift_add(scc, a, b, 3); }),
    salu("s_lshl4_add_u32", [](bool& scc, u32 a, u32 b) { return shift_add(scc, a, b, 4); }),
    salu("s_bfe_u32", [](bool& scc, u32 a, u32 b) { return nonzero<u32>(scc, u32(field(a, b, 32))); }),
    salu("s_bfe_i32", [](bool& scc, i32 a, u32 b) { return nonzero<i32>(scc, i32(signed_field(a, b, 32))); }),
    salu("s_bfe_u64", [](bool& scc, u64 a, u32 b) { return nonzero<u64>(scc, field(a, b, 64)); }),
    salu("s_bfe_i64", [](bool& scc, i64 a, u32 b) { return nonzero<i64>(scc, signed_field(a, b, 64)); }),
    salu("s_bfm_b32", [](bool&, u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }),
    salu("s_bfm_b64", [](bool&, u32 a, u32 b) { return ((1ull << (a & 63)) - 1) << (b & 63); }),
    salu("s_brev_b32", [](bool&, u32 a) { return u32(reverse(a, 32)); }),
    salu("s_brev_b64", [](bool&, u64 a) { return reverse(a, 64); }),
    salu("s_bcnt0_i32_b32", [](bool& scc, u32 a) { return nonzero<u32>(scc, u32(__builtin_popcount(~a))); }),
    salu("s_bcnt1_i32_b32", [](bool& scc, u32 a) { return nonzero<u32>(scc, u32(__builtin_popcount(a))); }),
    salu("s_bcnt1_i32_b64", [](bool& scc, u64 a) { return nonzero<u32>(scc, u32(__builtin_popcountll(a))); }),
    salu("s_ff1_i32_b32", [](bool&, u32 a) { return a ? u32(__builtin_ctz(a)) : ~0u; }),
    salu("s_ff1_i32_b64", [](bool&, u64 a) { return a ? u32(__builtin_ctzll(a)) : ~0u; }),
    salu("s_flbit_i32_b32", [](bool&, u32 a) { return a ? u32(__builtin_clz(a)) : ~0u; }),
    salu("s_flbit_i32",
         [](bool&, u32 a) {
           u32 x = a >> 31 ? ~a : a;
           return x ? u32(__builtin_clz(x)) : ~0u;
         }),
    salu("s_ff0_i32_b32", [](bool&, u32 a) { return ~a ? u32(__builtin_ctz(~a)) : ~0u; }),
    salu("s_flbit_i32_b64", [](bool&, u64 a) { return a ? u32(__builtin_clzll(a)) : ~0u; }),
    salu("s_sext_i32_i8", [](bool&, u32 a) { return u32(i32(i8(a))); }),
    salu("s_sext_i32_i16", [](bool&, u32 a) { return u32(i32(i16(a))); }),
    salu("s_abs_i32", [](bool& scc, i32 a) { return nonzero<u32>(scc, a < 0 ? 0u - u32(a) : u32(a)); }),
    salu("s_absdiff_i32",
         [](bool& scc, i32 a, i32 b) {
           return nonzero<u32>(scc, i32(u32(a) - u32(b)) < 0 ? u32(b) - u32(a) : u32(a) - u32(b));
         }),
    salu("s_pack_ll_b32_b16", [](bool&, u32 a, u32 b) { return (a & 0xffff) | b << 16; }),
    salu("s_pack_lh_b32_b16", [](bool&, u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000); }),
    salu("s_pack_hh_b32_b16", [](bool&, u32 a, u32 b) { return a >> 16 | (b & 0xffff0000); }),
    salu(
        "s_bitset0_b32", [](bool&, u32 a, u32 old) { return old & ~(1u << (a & 31)); }, keep_destination),
    salu(
        "s_bitset1_b32", [](bool&, u32 a, u32 old) { return old | 1u << (a & 31); }, keep_destination),
    salu("s_wqm_b64",
         [](bool& scc, u64 a) {
           u64 any = (a | a >> 1 | a >> 2 | a >> 3) & 0x1111111111111111ull;
           return nonzero<u64>(scc, any * 15);
         }),
    saveexec("s_and_saveexec_b64", [](u64 a, u64 e) { return a & e; }),
    saveexec("s_or_saveexec_b64", [](u64 a, u64 e) { return a | e; }),
    saveexec("s_xor_saveexec_b64", [](u64 a, u64 e) { return a ^ e; }),
    saveexec("s_andn2_saveexec_b64", [](u64 a, u64 e) { return a & ~e; }),
    saveexec("s_orn2_saveexec_b64", [](u64 a, u64 e) { return a | ~e; }),
    saveexec("s_nand_saveexec_b64", [](u64 a, u64 e) { return ~(a & e); }),
    saveexec("s_nor_saveexec_b64", [](u64 a, u64 e) { return ~(a | e); }),
    saveexec("s_xnor_saveexec_b64", [](u64 a, u64 e) { return ~(a ^ e); }),
    saveexec("s_andn1_saveexec_b64", [](u64 a, u64 e) { return ~a & e; }),
};
extern const Table scalar_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
