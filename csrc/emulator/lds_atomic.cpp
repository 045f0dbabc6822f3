// Read-modify-write on LDS. Atomics of different waves on the same bytes do not race with each other.
#include "global.hpp"
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
  EXCHANGE,
  COMPARE,
  ADD_REAL,
  MIN_REAL,
  MAX_REAL,
  PK_ADD_F16,
  PK_ADD_BF16
};
constexpr i64 pack(Operation operation, int bytes, bool returns) {
  return i64(operation) | i64(bytes) << 8 | i64(returns) << 16;
}

template <class U, class S>
static U update(Operation operation, U old, U data, U other) {
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
    case EXCHANGE:
      return data;
    case COMPARE:
      return old == data ? other : old;
    default:
      break;
  }
  if (operation == PK_ADD_F16 || operation == PK_ADD_BF16)
    return U(add_halves(u32(old), u32(data), operation == PK_ADD_BF16));
  if (sizeof(U) == 8) {
    double a = bit_cast<double>(u64(old)), b = bit_cast<double>(u64(data));
    return U(bit_cast<u64>(operation == ADD_REAL ? a + b : operation == MIN_REAL ? fmin(a, b) : fmax(a, b)));
  }
  float a = real(u32(old)), b = real(u32(data));
  return U(word(operation == ADD_REAL ? a + b : operation == MIN_REAL ? min_f32(a, b) : max_f32(a, b)));
}

static void atomic(Wave& wave, const Inst& in) {
  Operation operation = Operation(in.opcode->aux & 255);
  u32 bytes = u32(in.opcode->aux >> 8 & 255);
  bool returns = in.opcode->aux >> 16 & 1;
  int at = returns ? 1 : 0;
  const Operand &a = in.op[at], &d = in.op[at + 1], &e = in.op[at + 2];
  u32 address[LANES];
  require_address(wave, in, a);
  for (int l = 0; l < LANES; l++) address[l] = wave.v[a.index][l] + u32(in.mod[mod_offset]);
  for_lanes(wave.exec, [&](int l) {
    if (!lds_in_bounds(wave, l, address[l], bytes, bytes)) return;
    if (wave.worker->launch->checks) lds_check_atomic(wave, l, address[l], bytes);
    u8* p = wave.worker->lds.bytes + address[l];
    u64 old = 0, data = wave.v[d.index][l], other = 0;
    if (bytes == 8) data |= u64(wave.v[d.index + 1][l]) << 32;
    if (operation == COMPARE)
      other = bytes == 8 ? u64(wave.v[e.index + 1][l]) << 32 | wave.v[e.index][l] : wave.v[e.index][l];
    memcpy(&old, p, bytes);
    u64 value = bytes == 8 ? update<u64, i64>(operation, old, data, other)
                           : update<u32, i32>(operation, u32(old), u32(data), u32(other));
    memcpy(p, &value, bytes);
    if (!returns) return;
    wave.v[in.op[0].index][l] = u32(old);
    if (bytes == 8) wave.v[in.op[0].index + 1][l] = u32(old >> 32);
  });
  lds_remember(wave, address, wave.exec, bytes, true);
  if (wave.exec) lds_count(wave, in, address, wave.exec, bytes, false);
  for (int i = 0; returns && i < in.op[0].count; i++) wave.defined[in.op[0].index + i] = true;
  issue(wave, LGKM, returns ? &in.op[0] : nullptr);
}

#define FORMS(name, operation, suffix, bytes)                                               \
  {"ds_" name "_" suffix, atomic, LDS, ANY_ARCH, pack(operation, bytes, false), nullptr}, { \
    "ds_" name "_rtn_" suffix, atomic, LDS, ANY_ARCH, pack(operation, bytes, true), nullptr \
  }
#define WIDTHS(name, operation, type) FORMS(name, operation, type "32", 4), FORMS(name, operation, type "64", 8)
static const Opcode entries[] = {
    WIDTHS("add", ADD, "u"),
    WIDTHS("sub", SUB, "u"),
    WIDTHS("inc", INC, "u"),
    WIDTHS("dec", DEC, "u"),
    WIDTHS("min", UMIN, "u"),
    WIDTHS("max", UMAX, "u"),
    WIDTHS("min", SMIN, "i"),
    WIDTHS("max", SMAX, "i"),
    WIDTHS("and", AND, "b"),
    WIDTHS("or", OR, "b"),
    WIDTHS("xor", XOR, "b"),
    WIDTHS("add", ADD_REAL, "f"),
    WIDTHS("min", MIN_REAL, "f"),
    WIDTHS("max", MAX_REAL, "f"),
    WIDTHS("cmpst", COMPARE, "b"),
    FORMS("pk_add", PK_ADD_F16, "f16", 4),
    FORMS("pk_add", PK_ADD_BF16, "bf16", 4),
    {"ds_wrxchg_rtn_b32", atomic, LDS, ANY_ARCH, pack(EXCHANGE, 4, true), nullptr},
    {"ds_wrxchg_rtn_b64", atomic, LDS, ANY_ARCH, pack(EXCHANGE, 8, true), nullptr},
};
extern const Table lds_atomic_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
