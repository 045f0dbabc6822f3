// Read-modify-write on global memory. Every one of them acts at device scope; sc0 asks for the old value.
#include "buffer.hpp"
#include "update.hpp"

namespace emulator {

constexpr i64 pack(Operation operation, int bytes) { return i64(operation) | i64(bytes) << 8; }

static void apply(Wave& wave, const Inst& in, const u64* address, u64 lanes, const Operand& data,
                  const Operand* result) {
  Operation operation = Operation(in.opcode->aux & 255);
  u32 bytes = u32(in.opcode->aux >> 8);
  Launch& launch = *wave.worker->launch;
  Clock learned = {};
  count_global(wave, in, lanes, bytes);
  u64 seen = 0;
  pthread_mutex_lock(&launch.lock);
  for_lanes(lanes, [&](int l) {
    u8* at = global_access(wave, in, l, address[l], bytes, bytes, READ | WRITE, ATOMIC_UPDATE);
    if (!at) return;
    u64 old = 0;
    memcpy(&old, at, bytes);
    // A compare-and-swap has the value that is stored before the one that is compared.
    u64 stored = lane_data(wave, data.index, bytes, l);
    u64 compare = operation == COMPARE_SWAP ? lane_data(wave, data.index + i32(bytes / 4), bytes, l) : 0;
    u64 value = updated(operation, bytes, old, stored, compare);
    if (result) learn(wave, address[l], learned);
    publish(wave, address[l]);
    memcpy(at, &value, bytes);
    if (l == first_lane(lanes)) seen = old;
    if (!result) return;
    wave.v[result->index][l] = u32(old);
    if (bytes == 8) wave.v[result->index + 1][l] = u32(old >> 32);
  });
  pthread_mutex_unlock(&launch.lock);
  if (!result) {
    issue(wave, VM, nullptr);
    return;
  }
  if (learned.entries.size)
    issue_landing(wave, Landing::ACQUIRE, result).learned = learned;
  else
    issue(wave, VM, result);
  if (lanes) watch_spin(wave, in, address[first_lane(lanes)], u32(seen));
}

// global_atomic_* [result,] address, data, base
static void global_atomic(Wave& wave, const Inst& in) {
  bool returns = in.mod[mod_sc0];
  int at = returns ? 1 : 0;
  const Operand &v = in.op[at], &data = in.op[at + 1], &base = in.op[at + 2];
  u64 address[LANES];
  require_address(wave, in, v);
  global_addresses(wave, in, v, base, address);
  apply(wave, in, address, wave.exec, data, returns ? &in.op[0] : nullptr);
  if (in.opcode->name[0] == 'f') issue(wave, LGKM, returns ? &in.op[0] : nullptr);
}

// buffer_atomic_* data, address, resource, offset: the result replaces the data
static void buffer_atomic(Wave& wave, const Inst& in) {
  BufferLanes lanes;
  u32 bytes = u32(in.opcode->aux >> 8);
  if (in.mod[mod_offen] || in.mod[mod_idxen]) require_address(wave, in, in.op[in.source]);
  buffer_addresses(wave, in, bytes, lanes);
  u64 active = 0;
  for_lanes(wave.exec, [&](int l) { active |= u64(lanes.valid[l] >= bytes) << l; });
  Operand result = in.op[0];
  result.count = i32(bytes / 4);
  apply(wave, in, lanes.address, active, in.op[0], in.mod[mod_sc0] ? &result : nullptr);
}

static const char* result_if_sc0(Inst& in) {
  int wanted = (in.opcode->name[0] == 'f' ? 2 : 3) + (in.mod[mod_sc0] ? 1 : 0);
  return in.operands == wanted ? nullptr : "sc0 and the number of operands of an atomic do not agree";
}

#define UPDATE_ON(name, operation, bytes, buffer_arch)                                                        \
  {"global_atomic_" name, global_atomic, Class::ATOMIC, ANY_ARCH, pack(operation, bytes), result_if_sc0},     \
      {"flat_atomic_" name, global_atomic, Class::ATOMIC, ANY_ARCH, pack(operation, bytes), result_if_sc0}, { \
    "buffer_atomic_" name, buffer_atomic, Class::ATOMIC, buffer_arch, pack(operation, bytes), buffer_operands \
  }
#define UPDATE(name, operation, bytes) UPDATE_ON(name, operation, bytes, ANY_ARCH)
#define BOTH(name, operation) UPDATE(name, operation, 4), UPDATE(name "_x2", operation, 8)
static const Opcode entries[] = {
    BOTH("add", ADD),
    BOTH("sub", SUB),
    BOTH("swap", SWAP),
    BOTH("cmpswap", COMPARE_SWAP),
    BOTH("and", AND),
    BOTH("or", OR),
    BOTH("xor", XOR),
    BOTH("umin", UMIN),
    BOTH("umax", UMAX),
    BOTH("smin", SMIN),
    BOTH("smax", SMAX),
    BOTH("inc", INC),
    BOTH("dec", DEC),
    UPDATE("add_f32", ADD_REAL, 4),
    UPDATE("add_f64", ADD_REAL, 8),
    UPDATE("min_f64", MIN_REAL, 8),
    UPDATE("max_f64", MAX_REAL, 8),
    UPDATE("pk_add_f16", PK_ADD_F16, 4),
    UPDATE_ON("pk_add_bf16", PK_ADD_BF16, 4, GFX950),
};
extern const Table atomic_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
