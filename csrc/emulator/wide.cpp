// 64-bit integers and carries of the vector unit.
#include "vector.hpp"

namespace emulator {

// d, carry-out = a + b (+ carry-in); the operands of the subtractions are exchanged by the `rev` forms.
enum Carry { SUBTRACT = 1, REVERSED = 2, CARRY_IN = 4 };
static void add_with_carry(Wave& wave, const Inst& in) {
  u32 ra[LANES], rb[LANES], out[LANES];
  i64 how = in.opcode->aux;
  const u32 *a = source_row(wave, in, 2, ra), *b = source_row(wave, in, 3, rb);
  if (how & REVERSED) {
    const u32* t = a;
    a = b;
    b = t;
  }
  u64 carry = how & CARRY_IN ? scalar64(wave, in.op[4]) : 0, carried = 0;
  for (int l = 0; l < LANES; l++) {
    u64 c = carry >> l & 1, r = how & SUBTRACT ? u64(a[l]) - b[l] - c : u64(a[l]) + b[l] + c;
    out[l] = u32(r);
    carried |= (r >> 32 & 1) << l;
  }
  u64 lanes = wave.exec;
  commit_row(wave, in, 0, out, false);
  wave.set_scalar64(in.op[1].index, carried & lanes);
}

template <bool SIGNED>
static void multiply_add_64(Wave& wave, const Inst& in) {
  u32 ra[LANES], rb[LANES];
  u64 c[LANES], out[LANES], carried = 0;
  const u32 *a = source_row(wave, in, 2, ra), *b = source_row(wave, in, 3, rb);
  source_pair(wave, in, 4, c);
  for (int l = 0; l < LANES; l++) {
    u64 product = SIGNED ? u64(i64(i32(a[l])) * i32(b[l])) : u64(a[l]) * b[l];
    out[l] = product + c[l];
    i64 sum;
    bool carry = SIGNED ? __builtin_add_overflow(i64(product), i64(c[l]), &sum) : out[l] < product;
    carried |= u64(carry) << l;
  }
  u64 lanes = wave.exec;
  commit_pair(wave, in, out);
  wave.set_scalar64(in.op[1].index, carried & lanes);
}

static const char* two_destinations(Inst& in) {
  in.source = 2;
  return nullptr;
}

static const Opcode entries[] = {
    vector("v_mov_b64", [](u64 a) { return a; }),
    vector("v_lshlrev_b64", [](u32 a, u64 b) { return b << (a & 63); }),
    vector("v_lshrrev_b64", [](u32 a, u64 b) { return b >> (a & 63); }),
    vector("v_ashrrev_i64", [](u32 a, i64 b) { return b >> (a & 63); }),
    vector("v_lshl_add_u64", [](u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; }),
    {"v_add_co_u32", add_with_carry, VALU, ANY_ARCH, 0, two_destinations},
    {"v_sub_co_u32", add_with_carry, VALU, ANY_ARCH, SUBTRACT, two_destinations},
    {"v_subrev_co_u32", add_with_carry, VALU, ANY_ARCH, SUBTRACT | REVERSED, two_destinations},
    {"v_addc_co_u32", add_with_carry, VALU, ANY_ARCH, CARRY_IN, two_destinations},
    {"v_subb_co_u32", add_with_carry, VALU, ANY_ARCH, SUBTRACT | CARRY_IN, two_destinations},
    {"v_subbrev_co_u32", add_with_carry, VALU, ANY_ARCH, SUBTRACT | REVERSED | CARRY_IN, two_destinations},
    {"v_mad_u64_u32", multiply_add_64<false>, VALU, ANY_ARCH, 0, two_destinations},
    {"v_mad_i64_i32", multiply_add_64<true>, VALU, ANY_ARCH, 0, two_destinations},
};
extern const Table wide_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
