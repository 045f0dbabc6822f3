// Transposes rows of keys to columns of keys in registers, for archs without a transposed LDS read.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

// Bytes 0-3 of a selector of v_perm_b32 name the second argument, 4-7 the first.
MLA_DEVICE uint32_t low_halves(uint32_t first, uint32_t second) {
  return __builtin_amdgcn_perm(second, first, 0x05040100);
}
MLA_DEVICE uint32_t high_halves(uint32_t first, uint32_t second) {
  return __builtin_amdgcn_perm(second, first, 0x07060302);
}

// The same of bytes: the two low or the two high ones of two words, in turn.
MLA_DEVICE uint32_t mix_low_bytes(uint32_t first, uint32_t second) {
  return __builtin_amdgcn_perm(second, first, 0x05010400);
}
MLA_DEVICE uint32_t mix_high_bytes(uint32_t first, uint32_t second) {
  return __builtin_amdgcn_perm(second, first, 0x07030602);
}

// Four keys of one pair of columns, each word = (column 0, column 1 << 16), become two matrix operands of four keys of
// one column each: four v_perm_b32 for eight values.
struct KeyColumns {
  u32x2 first;   // column 0: keys 0..3
  u32x2 second;  // column 1: keys 0..3
};

MLA_DEVICE KeyColumns transpose_pair(uint32_t key0, uint32_t key1, uint32_t key2, uint32_t key3) {
  return KeyColumns{u32x2{low_halves(key0, key1), low_halves(key2, key3)},
                    u32x2{high_halves(key0, key1), high_halves(key2, key3)}};
}

}  // namespace cdna
