// An instruction of the vector unit is a lambda over one lane; its parameter types say how the operands are read.
//   u32, i32, float: one register; u64, i64, double: a pair; Half: 16 bits of a register as a float.
#pragma once
#include "numbers.hpp"
#include "wave.hpp"

namespace emulator {

struct Half {
  float value;
};
constexpr i64 PRESERVES_HIGH = 1;  // aux of a 16-bit instruction that keeps the upper half of its destination

// A lambda without captures has no state, so any storage serves as the object.
template <class F>
inline F& stateless() {
  static char storage[sizeof(F)];
  return *reinterpret_cast<F*>(storage);
}

// The bits of one register per lane, after DPP and SDWA selection, before sign modifiers. Points into the register file
// when it can.
const u32* source_row(Wave& wave, const Inst& in, int k, u32* room);
void source_pair(Wave& wave, const Inst& in, int k, u64* out);
// The row in which a 32-bit result may be computed in place, or null.
u32* direct_row(Wave& wave, const Inst& in);
void commit_row(Wave& wave, const Inst& in, int offset, const u32* result, bool real_result);
void commit_pair(Wave& wave, const Inst& in, const u64* result);
void commit_half(Wave& wave, const Inst& in, const u16* result);
u64 writing_lanes(const Wave& wave, const Inst& in);

template <class T>
struct Lane;

template <class T, bool REAL>
struct Lane32 {
  static const T* read(Wave& wave, const Inst& in, int k, T* room) {
    const u32* row = source_row(wave, in, k, reinterpret_cast<u32*>(room));
    const Operand& op = in.op[k];
    u32* out = reinterpret_cast<u32*>(room);
    if (op.flags & (NEGATE | ABSOLUTE)) {
      u32 keep = op.flags & ABSOLUTE ? 0x7fffffff : ~0u, flip = op.flags & NEGATE ? 0x80000000 : 0;
      for (int l = 0; l < LANES; l++) out[l] = (row[l] & keep) ^ flip;
      row = out;
    }
    if (REAL && wave.flush32) {
      for (int l = 0; l < LANES; l++) out[l] = word(flush(real(row[l])));
      row = out;
    }
    return reinterpret_cast<const T*>(row);
  }
  static void write(Wave& wave, const Inst& in, T* result) {
    if (REAL && wave.flush32)
      for (int l = 0; l < LANES; l++) result[l] = T(flush(float(result[l])));
    commit_row(wave, in, 0, reinterpret_cast<u32*>(result), REAL);
  }
  static T* place(Wave& wave, const Inst& in, T* room) {
    u32* row = REAL && wave.flush32 ? nullptr : direct_row(wave, in);
    return row ? reinterpret_cast<T*>(row) : room;
  }
};
template <>
struct Lane<u32> : Lane32<u32, false> {};
template <>
struct Lane<i32> : Lane32<i32, false> {};
template <>
struct Lane<float> : Lane32<float, true> {};

template <class T, bool REAL>
struct Lane64 {
  static const T* read(Wave& wave, const Inst& in, int k, T* room) {
    u64* out = reinterpret_cast<u64*>(room);
    source_pair(wave, in, k, out);
    const Operand& op = in.op[k];
    if (REAL && op.kind == LITERAL && !(op.flags & FLOAT_LITERAL) && (i64(op.wide) > 64 || i64(op.wide) < -16))
      for (int l = 0; l < LANES; l++) out[l] = op.literal << 32;  // a 32-bit literal is the upper half of a double
    for (int l = 0; l < LANES; l++) {
      if (op.flags & ABSOLUTE) out[l] &= ~(1ull << 63);
      if (op.flags & NEGATE) out[l] ^= 1ull << 63;
    }
    return room;
  }
  static void write(Wave& wave, const Inst& in, T* result) { commit_pair(wave, in, reinterpret_cast<u64*>(result)); }
  static T* place(Wave&, const Inst&, T* room) { return room; }
};
template <>
struct Lane<u64> : Lane64<u64, false> {};
template <>
struct Lane<i64> : Lane64<i64, false> {};
template <>
struct Lane<double> : Lane64<double, true> {};

template <>
struct Lane<Half> {
  static const Half* read(Wave& wave, const Inst& in, int k, Half* room) {
    u32 bits[LANES];
    const u32* row = source_row(wave, in, k, bits);
    const Operand& op = in.op[k];
    int shift = in.mod[mod_op_sel] >> (k - in.source) & 1 ? 16 : 0;
    u16 fixed = op.flags & FLOAT_LITERAL ? double_to_half(bit_cast<double>(op.wide)) : 0;
    for (int l = 0; l < LANES; l++) {
      u16 h = op.flags & FLOAT_LITERAL ? fixed : u16(row[l] >> shift);
      if (op.flags & ABSOLUTE) h &= 0x7fff;
      if (op.flags & NEGATE) h ^= 0x8000;
      if (wave.flush16 && !(h & 0x7c00)) h &= 0x8000;
      room[l].value = half_to_float(h);
    }
    return room;
  }
  static void write(Wave& wave, const Inst& in, Half* result) {
    u16 bits[LANES];
    for (int l = 0; l < LANES; l++) {
      bits[l] = float_to_half(result[l].value);
      if (wave.flush16 && !(bits[l] & 0x7c00)) bits[l] &= 0x8000;
    }
    commit_half(wave, in, bits);
  }
  static Half* place(Wave&, const Inst&, Half* room) { return room; }
};

template <class F, class R, class... A>
struct Vector;
template <class F, class R>
struct Vector<F, R> {
  static void run(Wave& wave, const Inst& in) {
    alignas(64) R room[LANES];
    R* out = Lane<R>::place(wave, in, room);
    for (int l = 0; l < LANES; l++) out[l] = stateless<F>()();
    if (out == room) Lane<R>::write(wave, in, room);
  }
};
template <class F, class R, class A>
struct Vector<F, R, A> {
  static void run(Wave& wave, const Inst& in) {
    alignas(64) A ra[LANES];
    alignas(64) R room[LANES];
    const A* a = Lane<A>::read(wave, in, in.source, ra);
    R* out = Lane<R>::place(wave, in, room);
    for (int l = 0; l < LANES; l++) out[l] = stateless<F>()(a[l]);
    if (out == room) Lane<R>::write(wave, in, room);
  }
};
template <class F, class R, class A, class B>
struct Vector<F, R, A, B> {
  static void run(Wave& wave, const Inst& in) {
    alignas(64) A ra[LANES];
    alignas(64) B rb[LANES];
    alignas(64) R room[LANES];
    const A* a = Lane<A>::read(wave, in, in.source, ra);
    const B* b = Lane<B>::read(wave, in, in.source + 1, rb);
    R* out = Lane<R>::place(wave, in, room);
    for (int l = 0; l < LANES; l++) out[l] = stateless<F>()(a[l], b[l]);
    if (out == room) Lane<R>::write(wave, in, room);
  }
};
template <class F, class R, class A, class B, class C>
struct Vector<F, R, A, B, C> {
  static void run(Wave& wave, const Inst& in) {
    alignas(64) A ra[LANES];
    alignas(64) B rb[LANES];
    alignas(64) C rc[LANES];
    alignas(64) R room[LANES];
    const A* a = Lane<A>::read(wave, in, in.source, ra);
    const B* b = Lane<B>::read(wave, in, in.source + 1, rb);
    const C* c = Lane<C>::read(wave, in, in.source + 2, rc);
    R* out = Lane<R>::place(wave, in, room);
    for (int l = 0; l < LANES; l++) out[l] = stateless<F>()(a[l], b[l], c[l]);
    if (out == room) Lane<R>::write(wave, in, room);
  }
};

template <class F>
struct Signature : Signature<decltype(&F::operator())> {};
template <class F, class R, class... A>
struct Signature<R (F::*)(A...) const> {
  using Runner = Vector<F, R, A...>;
  static constexpr int sources = sizeof...(A);
};

// An instruction with one source fewer in the text reads its destination as the last one (v_fmac, v_dot2c ...).
const char* accumulate_into_destination(Inst& in);

template <class F>
constexpr Opcode vector(const char* name, F, Class group = VALU, int arch = ANY_ARCH, i64 aux = 0) {
  return Opcode{name, &Signature<F>::Runner::run, group, arch, aux, nullptr};
}
template <class F>
constexpr Opcode vector_accumulate(const char* name, F, int arch = ANY_ARCH) {
  return Opcode{name, &Signature<F>::Runner::run, VALU, arch, 0, accumulate_into_destination};
}

}  // namespace emulator
