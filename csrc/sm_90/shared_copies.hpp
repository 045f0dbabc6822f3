// Ordinary copies to shared memory, in groups that the copying thread waits for, and from and to it, 16 or 4 bytes at a
// time.
#pragma once

#include "common/device.hpp"

namespace mla::sm90 {

// 16, 8 or 4 bytes to shared memory; zeros when not `present` (nothing is read then).
template <int BYTES>
MLA_DEVICE void copy_present(uint32_t to, uint64_t from, bool present) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(present ? BYTES : 0)
                 : "memory");
}
// 16 or 8 bytes, by lanes that have any.
template <int BYTES>
MLA_DEVICE void copy_present(bool any, uint32_t to, uint64_t from, bool present) {
  if constexpr (BYTES == 16)
    asm volatile(
        "{\n.reg .pred any;\nsetp.ne.b32 any, %3, 0;\n@any cp.async.cg.shared.global [%0], [%1], 16, %2;\n}\n" ::"r"(
            to),
        "l"(from), "r"(present ? 16 : 0), "r"(static_cast<int>(any))
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred any;\nsetp.ne.b32 any, %4, 0;\n@any cp.async.ca.shared.global [%0], [%1], %2, %3;\n}\n" ::"r"(
            to),
        "l"(from), "n"(BYTES), "r"(present ? BYTES : 0), "r"(static_cast<int>(any))
        : "memory");
}
MLA_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
MLA_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four bytes of any type.
template <class V>
MLA_DEVICE V load_shared(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return bit_cast<V>(value);
}
template <class V>
MLA_DEVICE void store_shared(uint32_t to, V value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bit_cast<uint32_t>(value)) : "memory");
}

MLA_DEVICE void load16(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
MLA_DEVICE void store16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
MLA_DEVICE void store16(uint32_t to, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]),
               "f"(values[3])
               : "memory");
}
// By lanes that have any.
MLA_DEVICE void store16(bool any, uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile(
      "{\n.reg .pred any;\nsetp.ne.b32 any, %5, 0;\n@any st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n}\n" ::"r"(to),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(static_cast<int>(any))
      : "memory");
}

}  // namespace mla::sm90
