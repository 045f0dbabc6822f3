// Read-modify-write on LDS. Atomics of different waves on the same bytes do not race with each other.
#include "global.hpp"
#include "update.hpp"

namespace emulator {

constexpr i64 pack(Operation operation, int bytes, bool returns) {
  return i64(operation) | i64(bytes) << 8 | i64(returns) << 16;
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
    u64 old = 0, first = lane_data(wave, d.index, bytes, l);
    memcpy(&old, p, bytes);
    // A compare-and-swap has the value that is compared before the one that is stored.
    u64 value = operation == COMPARE_SWAP ? updated(operation, bytes, old, lane_data(wave, e.index, bytes, l), first)
                                          : updated(operation, bytes, old, first, 0);
    memcpy(p, &value, bytes);
    if (!returns) return;
    wave.v[in.op[0].index][l] = u32(old);
    if (bytes == 8) wave.v[in.op[0].index + 1][l] = u32(old >> 32);
  });
  lds_remember(wave, address, wave.exec, bytes, true);
  if (wave.exec) lds_count(wave, in, address, wave.exec, bytes, false);
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
    WIDTHS("cmpst", COMPARE_SWAP, "b"),
    FORMS("pk_add", PK_ADD_F16, "f16", 4),
    FORMS("pk_add", PK_ADD_BF16, "bf16", 4),
    {"ds_wrxchg_rtn_b32", atomic, LDS, ANY_ARCH, pack(SWAP, 4, true), nullptr},
    {"ds_wrxchg_rtn_b64", atomic, LDS, ANY_ARCH, pack(SWAP, 8, true), nullptr},
};
extern const Table lds_atomic_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
