// Scalar compares: SCC only.
#include "wave.hpp"

namespace emulator {

template <class F>
struct CompareTypes : CompareTypes<decltype(&F::operator())> {};
template <class F, class A>
struct CompareTypes<bool (F::*)(A, A) const> {
  using Type = A;
};

template <class F>
static void scalar_compare(Wave& wave, const Inst& in) {
  using A = typename CompareTypes<F>::Type;
  static char storage[sizeof(F)];
  A a = sizeof(A) == 8 ? A(scalar64(wave, in.op[0])) : A(scalar(wave, in.op[0]));
  A b = sizeof(A) == 8 ? A(scalar64(wave, in.op[1])) : A(scalar(wave, in.op[1]));
  wave.scc = (*reinterpret_cast<F*>(storage))(a, b);
}
static const char* signed_16(Inst& in) {
  in.op[1].literal = u32(i32(i16(in.op[1].literal)));
  return nullptr;
}
static const char* unsigned_16(Inst& in) {
  in.op[1].literal &= 0xffff;
  return nullptr;
}
template <class F>
constexpr Opcode scmp(const char* name, F, const char* (*prepare)(Inst&) = nullptr) {
  return {name, &scalar_compare<F>, SALU, ANY_ARCH, 0, prepare};
}

#define COMPARE(name, op)                                                                 \
  scmp("s_cmp_" name "_i32", [](i32 a, i32 b) -> bool { return a op b; }),                \
      scmp("s_cmp_" name "_u32", [](u32 a, u32 b) -> bool { return a op b; }),            \
      scmp(                                                                               \
          "s_cmpk_" name "_i32", [](i32 a, i32 b) -> bool { return a op b; }, signed_16), \
      scmp("s_cmpk_" name "_u32", [](u32 a, u32 b) -> bool { return a op b; }, unsigned_16)

static const Opcode entries[] = {
    COMPARE("eq", ==),
    COMPARE("lg", !=),
    COMPARE("gt", >),
    COMPARE("ge", >=),
    COMPARE("lt", <),
    COMPARE("le", <=),
    scmp("s_cmp_eq_u64", [](u64 a, u64 b) -> bool { return a == b; }),
    scmp("s_cmp_lg_u64", [](u64 a, u64 b) -> bool { return a != b; }),
    scmp("s_bitcmp0_b32", [](u32 a, u32 b) -> bool { return !(a >> (b & 31) & 1); }),
    scmp("s_bitcmp1_b32", [](u32 a, u32 b) -> bool { return a >> (b & 31) & 1; }),
};
extern const Table scalar_compare_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
