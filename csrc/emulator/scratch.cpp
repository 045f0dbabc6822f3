// Private memory: a lane's own bytes, where compilers spill registers. Every lane has its own copy at the same
// addresses.
#include "global.hpp"

namespace emulator {

// scratch_load d, address, base / scratch_store address, data, base: address and base are a register each, or `off`.
static void move(Wave& wave, const Inst& in) {
  i64 aux = in.opcode->aux;
  bool storing = shape_store(aux);
  const Operand &data = in.op[storing ? 1 : 0], &address = in.op[storing ? 0 : 1], &base = in.op[2];
  u32 bytes = u32(shape_bytes(aux)), size = wave.worker->launch->scratch_bytes;
  u64 at[LANES];
  require_address(wave, in, address);
  for (int l = 0; l < LANES; l++) {
    at[l] = u64(in.mod[mod_offset]);
    if (address.kind == VECTOR) at[l] += wave.v[address.index][l];
    if (base.kind == SCALAR) at[l] += wave.s[base.index];
  }
  for_lanes(wave.exec, [&](int l) {
    u8 none[16] = {};
    u8* place = none;
    if (at[l] > size || bytes > size - at[l]) {
      report(wave, found_scratch_out_of_bounds, 1ull << l, at[l], i64(bytes));
    } else {
      place = wave.worker->scratch + (u64(wave.id) * LANES + u64(l)) * size + at[l];
    }
    if (storing)
      store_register(wave, data.index, l, place, aux);
    else
      load_register(wave, data.index, l, place, aux);
  });
  issue(wave, VM, storing ? nullptr : &data);
}

static const char* three_operands(Inst& in) {
  const Operand& data = in.op[shape_store(in.opcode->aux) ? 1 : 0];
  int words = shape_bytes(in.opcode->aux) / 4;
  if (in.operands != 3) return "a scratch access has data, an address or off, and a base or off";
  return data.kind == VECTOR && data.count == (words ? words : 1) ? nullptr : "wrong number of registers for the data";
}

#define LOAD(name, bytes, part) \
  {"scratch_load_" name, move, GLOBAL, ANY_ARCH, memory_shape(bytes, part, false), three_operands}
#define STORE(name, bytes, part) \
  {"scratch_store_" name, move, GLOBAL, ANY_ARCH, memory_shape(bytes, part, true), three_operands}
static const Opcode entries[] = {
    MEMORY_FORMS(LOAD, STORE),
};
extern const Table scratch_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
