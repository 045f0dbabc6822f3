// What a read-modify-write makes of a value, in global memory and in LDS.
#pragma once
#include "numbers.hpp"

namespace emulator {

enum Operation {
  ADD,
  SUB,
  AND,
  OR,
  XOR,
  UMIN,
  UMAX,
  SMIN,
  SMAX,
  INC,
  DEC,
  SWAP,
  COMPARE_SWAP,  // stores `data` where the old value is `compare`
  ADD_REAL,
  MIN_REAL,
  MAX_REAL,
  PK_ADD_F16,
  PK_ADD_BF16
};

template <class U, class S>
U updated(Operation operation, U old, U data, U compare) {
  switch (operation) {
    case ADD:
      return old + data;
    case SUB:
      return old - data;
    case AND:
      return old & data;
    case OR:
      return old | data;
    case XOR:
      return old ^ data;
    case UMIN:
      return old < data ? old : data;
    case UMAX:
      return old > data ? old : data;
    case SMIN:
      return S(old) < S(data) ? old : data;
    case SMAX:
      return S(old) > S(data) ? old : data;
    case INC:
      return old >= data ? 0 : old + 1;
    case DEC:
      return old == 0 || old > data ? data : old - 1;
    case SWAP:
      return data;
    case COMPARE_SWAP:
      return old == compare ? data : old;
    case PK_ADD_F16:
    case PK_ADD_BF16:
      return U(add_halves(u32(old), u32(data), operation == PK_ADD_BF16));
    default:
      break;
  }
  if (sizeof(U) == 8) {
    double a = bit_cast<double>(u64(old)), b = bit_cast<double>(u64(data));
    return U(bit_cast<u64>(operation == ADD_REAL ? a + b : operation == MIN_REAL ? fmin(a, b) : fmax(a, b)));
  }
  float a = real(u32(old)), b = real(u32(data));
  return U(word(operation == ADD_REAL ? a + b : operation == MIN_REAL ? min_f32(a, b) : max_f32(a, b)));
}

inline u64 updated(Operation operation, u32 bytes, u64 old, u64 data, u64 compare) {
  return bytes == 8 ? updated<u64, i64>(operation, old, data, compare)
                    : updated<u32, i32>(operation, u32(old), u32(data), u32(compare));
}

}  // namespace emulator
