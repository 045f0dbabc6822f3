// Vector compares: one bit per active lane into a scalar pair, or into EXEC for the v_cmpx forms.
#include "vector.hpp"

namespace emulator {

template <class F>
struct CompareSignature : CompareSignature<decltype(&F::operator())> {};
template <class F, class A, class B>
struct CompareSignature<bool (F::*)(A, B) const> {
  using First = A;
  using Second = B;
};

template <class F>
static void compare(Wave& wave, const Inst& in) {
  using A = typename CompareSignature<F>::First;
  using B = typename CompareSignature<F>::Second;
  alignas(64) A ra[LANES];
  alignas(64) B rb[LANES];
  const A* a = Lane<A>::read(wave, in, in.source, ra);
  const B* b = Lane<B>::read(wave, in, in.source + 1, rb);
  u64 mask = 0;
  for (int l = 0; l < LANES; l++) mask |= u64(stateless<F>()(a[l], b[l])) << l;
  mask &= wave.exec;
  if (in.opcode->aux) wave.set_exec(mask);  // v_cmpx writes EXEC as well
  wave.set_scalar64(in.op[0].index, mask);
}

template <class F>
constexpr Opcode cmp(const char* name, F) {
  return {name, &compare<F>, VALU, ANY_ARCH, 0, nullptr};
}
template <class F>
constexpr Opcode cmpx(const char* name, F) {
  return {name, &compare<F>, VALU, ANY_ARCH, 1, nullptr};
}

static bool unordered(double a, double b) { return a != a || b != b; }

// v_cmp_class_f32: the second operand selects classes by bit. It looks at the bits as they are: a denormal is one
// whatever the mode says.
static bool in_class(u32 b, u32 classes) {
  u32 magnitude = b & 0x7fffffff;
  bool negative = b >> 31;
  int bit;
  if (magnitude > 0x7f800000)
    bit = magnitude & 0x400000 ? 1 : 0;
  else if (magnitude == 0x7f800000)
    bit = negative ? 2 : 9;
  else if (magnitude >= 0x00800000)
    bit = negative ? 3 : 8;
  else if (magnitude)
    bit = negative ? 4 : 7;
  else
    bit = negative ? 5 : 6;
  return classes >> bit & 1;
}

#define ORDERINGS(X, type, suffix) \
  X("lt_" suffix, a < b, type)     \
  X("eq_" suffix, a == b, type) X("le_" suffix, a <= b, type) X("gt_" suffix, a > b, type) X("ge_" suffix, a >= b, type)
#define INTEGER_COMPARES(X, type, suffix) \
  ORDERINGS(X, type, suffix)              \
  X("ne_" suffix, a != b, type)           \
  X("f_" suffix, ((void)a, (void)b, false), type) X("t_" suffix, ((void)a, (void)b, true), type)
#define REAL_COMPARES(X, type, suffix)                                                                               \
  ORDERINGS(X, type, suffix)                                                                                         \
  X("lg_" suffix, a<b || a> b, type)                                                                                 \
  X("neq_" suffix, a != b, type)                                                                                     \
  X("nlt_" suffix, !(a < b), type)                                                                                   \
  X("nle_" suffix, !(a <= b), type)                                                                                  \
  X("ngt_" suffix, !(a > b), type)                                                                                   \
  X("nge_" suffix, !(a >= b), type) X("nlg_" suffix, !(a < b || a > b), type) X("o_" suffix, !unordered(a, b), type) \
      X("u_" suffix, unordered(a, b), type) X("f_" suffix, ((void)a, (void)b, false), type)                          \
          X("tru_" suffix, ((void)a, (void)b, true), type)
#define HALF_COMPARES(X) REAL_COMPARES(X, Half, "f16")
#define ENTRY(name, expression, type)                                    \
  cmp("v_cmp_" name, [](type a, type b) -> bool { return expression; }), \
      cmpx("v_cmpx_" name, [](type a, type b) -> bool { return expression; }),
#define HALF_ENTRY(name, expression, type)        \
  cmp("v_cmp_" name, [](type x, type y) -> bool { \
    float a = x.value, b = y.value;               \
    return expression;                            \
  }),

static const Opcode entries[] = {
    INTEGER_COMPARES(ENTRY, u32, "u32") INTEGER_COMPARES(ENTRY, i32, "i32") INTEGER_COMPARES(ENTRY, u64, "u64")
        INTEGER_COMPARES(ENTRY, i64, "i64") REAL_COMPARES(ENTRY, float, "f32") REAL_COMPARES(ENTRY, double, "f64")
            HALF_COMPARES(HALF_ENTRY) cmp("v_cmp_class_f32", [](u32 a, u32 b) -> bool { return in_class(a, b); }),
    cmpx("v_cmpx_class_f32", [](u32 a, u32 b) -> bool { return in_class(a, b); }),
    cmp("v_cmp_eq_u16", [](u32 a, u32 b) -> bool { return u16(a) == u16(b); }),
    cmp("v_cmp_ne_u16", [](u32 a, u32 b) -> bool { return u16(a) != u16(b); }),
    cmp("v_cmp_lt_u16", [](u32 a, u32 b) -> bool { return u16(a) < u16(b); }),
    cmp("v_cmp_le_u16", [](u32 a, u32 b) -> bool { return u16(a) <= u16(b); }),
    cmp("v_cmp_gt_u16", [](u32 a, u32 b) -> bool { return u16(a) > u16(b); }),
    cmp("v_cmp_ge_u16", [](u32 a, u32 b) -> bool { return u16(a) >= u16(b); }),
    cmp("v_cmp_eq_i16", [](u32 a, u32 b) -> bool { return i16(a) == i16(b); }),
    cmp("v_cmp_ne_i16", [](u32 a, u32 b) -> bool { return i16(a) != i16(b); }),
    cmp("v_cmp_lt_i16", [](u32 a, u32 b) -> bool { return i16(a) < i16(b); }),
    cmp("v_cmp_le_i16", [](u32 a, u32 b) -> bool { return i16(a) <= i16(b); }),
    cmp("v_cmp_gt_i16", [](u32 a, u32 b) -> bool { return i16(a) > i16(b); }),
    cmp("v_cmp_ge_i16", [](u32 a, u32 b) -> bool { return i16(a) >= i16(b); }),
};
extern const Table compare_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
