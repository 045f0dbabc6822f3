// Scalar loads: the kernel's arguments and any uniform data. They return out of order.
#include "global.hpp"

namespace emulator {

static void read(Wave& wave, const Inst& in, u64 address, u32 limit) {
  int words = int(in.opcode->aux);
  u64 lane = wave.exec ? wave.exec & -wave.exec : 1;
  for (int i = 0; i < words; i++) {
    u32 value = 0;
    if (u32(4 * i) < limit) {
      const u8* from = global_access(wave, in, first_lane(lane), address + u64(4 * i), 4, 4, READ, PLAIN);
      if (from) memcpy(&value, from, 4);
    }
    wave.set_scalar(in.op[0].index + i, value);
  }
  wave.worker->counts[in.pc].global_bytes += u64(4 * words);
  Operand destination = in.op[0];
  destination.count = words;
  issue(wave, LGKM, &destination);
  wave.scalar_load = wave.issued[LGKM];
}

static u64 offset_of(Wave& wave, const Inst& in) {
  const Operand& op = in.op[2];
  i64 offset = in.mod[mod_offset];
  if (op.kind == SCALAR) return u64(offset) + wave.s[op.index];
  return u64(offset) + u64(i64(i32(op.literal)));
}

static void load(Wave& wave, const Inst& in) { read(wave, in, scalar64(wave, in.op[1]) + offset_of(wave, in), ~0u); }

static void buffer_load(Wave& wave, const Inst& in) {
  const u32* r = wave.s + in.op[1].index;
  u64 base = u64(r[1] & 0xffff) << 32 | r[0], offset = offset_of(wave, in);
  read(wave, in, base + offset, r[2] > offset ? u32(r[2] - offset) : 0);
}

static const char* three_operands(Inst& in) {
  return in.operands == 3 ? nullptr : "a scalar load has a destination, a base and an offset";
}
#define LOADS(suffix, words)                                                         \
  {"s_load_dword" suffix, load, SMEM, ANY_ARCH, words, three_operands}, {            \
    "s_buffer_load_dword" suffix, buffer_load, SMEM, ANY_ARCH, words, three_operands \
  }
static const Opcode entries[] = {LOADS("", 1), LOADS("x2", 2), LOADS("x4", 4), LOADS("x8", 8), LOADS("x16", 16)};
extern const Table scalar_memory_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
