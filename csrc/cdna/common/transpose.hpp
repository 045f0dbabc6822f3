// Transposes rows of keys to columns of keys in registers, for archs without a transposed LDS read.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

// Four keys of one pair of columns, each word = (column 0, column 1 << 16), become two matrix operands of four keys of
// one column each: four v_perm_b32 for eight values.
struct KeyColumns {
  u32x2 first;   // column 0: keys 0..3
  u32x2 second;  // column 1: keys 0..3
};

MLA_DEVICE KeyColumns transpose_pair(uint32_t key0, uint32_t key1, uint32_t key2, uint32_t key3) {
  // Bytes 0-3 of the selector name the second argument, 4-7 the first.
  constexpr uint32_t LOW_HALVES = 0x05040100;
  constexpr uint32_t HIGH_HALVES = 0x07060302;
  return KeyColumns{
      u32x2{__builtin_amdgcn_perm(key1, key0, LOW_HALVES), __builtin_amdgcn_perm(key3, key2, LOW_HALVES)},
      u32x2{__builtin_amdgcn_perm(key1, key0, HIGH_HALVES), __builtin_amdgcn_perm(key3, key2, HIGH_HALVES)}};
}

}  // namespace cdna
