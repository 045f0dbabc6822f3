// How a combine that already waits beside decode learns that a partial has come: from the partial itself.
//
// Before it lets combine start, decode makes every word of its partials NOT_YET. A word that is anything else is a
// result. So nothing need be ordered, and neither the end of a kernel nor a fence lies between the last store and the
// merge.
#pragma once

#include "common/device.hpp"

namespace mla::sm90 {

// As bits: a NaN that no arithmetic makes, since those are 0x7fffffff.
constexpr uint32_t NOT_YET = 0xffffffff;

// Words that the other kernel may be loading or storing: each is whole, by itself.
MLA_DEVICE uint4 load_arriving(const float* from) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}
MLA_DEVICE void store_arriving(uint4* to, const uint4& words) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
MLA_DEVICE void store_arriving(float* to, float word) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(word) : "memory");
}

}  // namespace mla::sm90
