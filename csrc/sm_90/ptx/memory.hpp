// Loads, stores and prefetches of global and shared memory, and the thread numbers that the roles compute with.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// The shared-memory address that PTX instructions take.
MLA_DEVICE uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// This thread's number within its block, and within its warpgroup. It is read from the special register at every use,
// because the roles have no register to keep it in.
MLA_DEVICE uint32_t read_thread_id() {
  uint32_t thread;  // unsigned: remainders and quotients by powers of two are then single instructions
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
MLA_DEVICE int warpgroup_thread() { return static_cast<int>(read_thread_id() % 128); }

// Makes the compiler have these words in registers here, as if they were changed: it neither computes them anew where
// they are used nor moves what they are computed from behind this point. One after the other, or by one statement, which
// the compiler orders otherwise.
MLA_DEVICE void pin_register(uint32_t& word) { asm volatile("" : "+r"(word)); }
MLA_DEVICE void pin_register(uint64_t& words) { asm volatile("" : "+l"(words)); }
MLA_DEVICE void pin_register(float& word) { asm volatile("" : "+f"(word)); }
template <class... Words>
MLA_DEVICE void pin_registers(Words&... words) {
  (pin_register(words), ...);
}
MLA_DEVICE void pin_floats(float& a, float& b) { asm volatile("" : "+f"(a), "+f"(b)); }
MLA_DEVICE void pin_together(uint32_t& a, uint32_t& b) { asm volatile("" : "+r"(a), "+r"(b)); }
MLA_DEVICE void pin_together(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t& e, uint32_t& f,
                             uint32_t& g) {
  asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f), "+r"(g));
}

// The address of a row: one instruction, where the compiler multiplies the upper halves, too.
MLA_DEVICE uint64_t row_address(uint64_t first, uint32_t row, uint32_t stride) {
  uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(stride), "l"(first));
  return address;
}

// The same pointer, of which the compiler knows that it points to global memory.
template <class T>
MLA_DEVICE T* global_pointer(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

template <class Word>
MLA_DEVICE void materialize_word(Word word) {
  asm volatile("" ::"l"(word) : "memory");
}
// The same for words that stay as they are, which also brings the 64 bytes around a parameter to the constant cache.
template <class... Words>
MLA_DEVICE void materialize(Words... words) {
  (materialize_word(words), ...);
}

// Tells the compiler that a value is the same in every lane of a warp, so that it keeps the value, and all that follows
// from it, in uniform registers. Without this, every wgmma of the main loop waits for two moves of its descriptor.
MLA_DEVICE int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Prefetches the 128-byte line that holds an address into L2.
MLA_DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Prefetches the same line into L1. PTX has no such prefetch; a load whose result nobody uses does it.
MLA_DEVICE void prefetch_l1(const void* address) {
  asm volatile("{\n.reg .b32 word;\nld.global.ca.b32 word, [%0];\n}\n" ::"l"(address));
}

// Loads a word that the previous kernel may have written, at an address that is known before griddep_wait. `__ldg` and
// `ld.global.nc` are wrong here: they read data that is taken to be constant, and ptxas has hoisted them above the
// wait. They are right where the address itself depends on a word loaded this way.
MLA_DEVICE int ld_global(const int32_t* address) {
  int value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

MLA_DEVICE int64_t ld_global(const int64_t* address) {
  int64_t value;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

MLA_DEVICE float ld_global(const float* address) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

MLA_DEVICE void ld_global_v4(const void* address, uint32_t (&to)[4]) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(address)
               : "memory");
}

// Loads from L2 a word that another kernel may be writing; bypasses L1, so that no stale copy stays there.
MLA_DEVICE int ld_relaxed_gpu(const int32_t* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Raises a float in memory to `value`, which is not NaN, by integer atomics: floats from +0 on are ordered as signed
// integers, negative ones in reverse as unsigned integers, and -0 becomes +0.
MLA_DEVICE void red_max_global(float* to, float value) {
  const int bits = __float_as_int(value + 0.0f);
  if (bits >= 0)
    asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
  else
    asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

// Adds to floats in memory; subnormal numbers count as zeros.
MLA_DEVICE void red_add_global(float* to, const float (&words)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(words[0]), "f"(words[1]),
               "f"(words[2]), "f"(words[3])
               : "memory");
}

// Relaxed accesses for data that another running kernel loads or stores: each 32-bit word is whole by itself, and
// nothing is ordered.
MLA_DEVICE uint4 ld_relaxed_gpu_v4(const float* from) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}
MLA_DEVICE void st_relaxed_gpu(uint4* to, const uint4& words) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
MLA_DEVICE void st_relaxed_gpu(float* to, const float (&words)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(words[0]), "f"(words[1]),
               "f"(words[2]), "f"(words[3])
               : "memory");
}
MLA_DEVICE void st_relaxed_gpu(float* to, float word) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(word) : "memory");
}

// Shared memory, 4 or 8 bytes of any type.
template <class V>
MLA_DEVICE V ld_shared(uint32_t from) {
  if constexpr (sizeof(V) == 8) {
    uint64_t value;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(from) : "memory");
    return bit_cast<V>(value);
  } else {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return bit_cast<V>(value);
  }
}
template <class V>
MLA_DEVICE void st_shared(uint32_t to, V value) {
  if constexpr (sizeof(V) == 8)
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(bit_cast<uint64_t>(value)) : "memory");
  else
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bit_cast<uint32_t>(value)) : "memory");
}

// One or two bytes, widened with zeros.
MLA_DEVICE uint32_t ld_shared_u8(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
MLA_DEVICE uint32_t ld_shared_u16(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}

// Shared memory, two or four words of 4 bytes, or two of 8.
MLA_DEVICE void ld_shared_v2(uint32_t from, uint32_t (&to)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}
MLA_DEVICE void ld_shared_v2(uint32_t from, uint64_t (&to)[2]) {
  asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];" : "=l"(to[0]), "=l"(to[1]) : "r"(from) : "memory");
}
MLA_DEVICE void ld_shared_v4(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
template <class V>
MLA_DEVICE void ld_shared_v2(uint32_t from, V& a, V& b) {
  uint32_t words[2];
  ld_shared_v2(from, words);
  a = bit_cast<V>(words[0]);
  b = bit_cast<V>(words[1]);
}
template <class V>
MLA_DEVICE void ld_shared_v4(uint32_t from, V& a, V& b, V& c, V& d) {
  uint32_t words[4];
  ld_shared_v4(from, words);
  a = bit_cast<V>(words[0]);
  b = bit_cast<V>(words[1]);
  c = bit_cast<V>(words[2]);
  d = bit_cast<V>(words[3]);
}
template <class V>
MLA_DEVICE void st_shared_v2(uint32_t to, V a, V b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(bit_cast<uint32_t>(a)), "r"(bit_cast<uint32_t>(b))
               : "memory");
}
MLA_DEVICE void st_shared_v2(uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
MLA_DEVICE void st_shared_v2(uint32_t to, const uint32_t (&values)[2]) { st_shared_v2(to, values[0], values[1]); }
MLA_DEVICE void st_shared_v4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
MLA_DEVICE void st_shared_v4(uint32_t to, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]),
               "f"(values[3])
               : "memory");
}
// The same as a predicated instruction: lanes with `active` false store nothing, and no branch is made.
MLA_DEVICE void st_shared_v4_if(bool active, uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile(
      "{\n.reg .pred any;\nsetp.ne.b32 any, %5, 0;\n@any st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n}\n" ::"r"(to),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(static_cast<int>(active))
      : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements: each lane gives the address of one 16-byte row.
MLA_DEVICE void ldmatrix_x4(uint32_t from, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements: each lane gives the address of one 16-byte row.
MLA_DEVICE void stmatrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements transposed: each lane gives the address of one 16-byte row, whose eight
// elements come from the eight rows that the registers hold.
MLA_DEVICE void stmatrix_trans_x4(uint32_t to, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace mla::sm_90
