// Buffer loads and stores through a four-word resource: base, stride, size in bytes or records, flags.
// Parts of an access past the size are not errors: they load zero and store nothing. The size is still checked against
// real allocations.
#include "buffer.hpp"

namespace emulator {

const char* buffer_operands(Inst& in) {
  bool to_lds = in.mod[mod_lds];
  int base = to_lds ? 0 : 1;
  if (in.operands < base + 3) return "a buffer instruction needs an address, a resource of four scalars and an offset";
  if (in.op[base + 1].kind != SCALAR || in.op[base + 1].count != 4) return "a buffer resource is four scalar registers";
  bool both = in.mod[mod_offen] && in.mod[mod_idxen];
  if (both && in.op[base].count != 2) return "offen and idxen together need an address pair";
  in.source = base;
  return nullptr;
}

static const char* data_and_buffer(Inst& in) {
  const char* wrong = buffer_operands(in);
  if (wrong || in.mod[mod_lds]) return wrong;
  return holds_data(in.op[0], shape_bytes(in.opcode->aux)) ? nullptr : "wrong number of registers for the data";
}

void buffer_addresses(Wave& wave, const Inst& in, u32 bytes, BufferLanes& out) {
  const Operand &v = in.op[in.source], &resource = in.op[in.source + 1], &shift = in.op[in.source + 2];
  const u32* r = wave.s + resource.index;
  u64 base = u64(r[1] & 0xffff) << 32 | r[0];
  u32 stride = r[1] >> 16 & 0x3fff, records = r[2];
  if (r[1] >> 31 || r[3] >> 23 & 1)
    report(wave, found_bad_resource, wave.exec, base, i64(r[1]));  // swizzled, or thread id added
  u64 scalar_offset = shift.kind == SCALAR || shift.kind == LITERAL ? scalar(wave, shift) : 0;
  bool offen = in.mod[mod_offen], idxen = in.mod[mod_idxen];
  for (int l = 0; l < LANES; l++) {
    u64 index = idxen ? wave.v[v.index][l] : 0;
    u64 offset = u64(in.mod[mod_offset]) + (offen ? wave.v[v.index + (idxen ? 1 : 0)][l] : 0);
    u64 at = offset + scalar_offset + index * stride;
    out.address[l] = base + at;
    if (stride && idxen) {
      out.valid[l] = index < records ? bytes : 0;
    } else {
      u64 room = records > at ? records - at : 0;
      out.valid[l] = room >= bytes ? bytes : bytes < 4 ? 0 : u32(room) & ~3u;  // whole words in range
    }
  }
}

static void load(Wave& wave, const Inst& in) {
  i64 aux = in.opcode->aux;
  u32 bytes = u32(shape_bytes(aux));
  BufferLanes lanes;
  if (in.mod[mod_offen] || in.mod[mod_idxen]) require_address(wave, in, in.op[in.source]);
  buffer_addresses(wave, in, bytes, lanes);
  if (in.mod[mod_lds]) {
    u64 zero = 0;
    for (int l = 0; l < LANES; l++) zero |= u64(lanes.valid[l] < bytes) << l;
    load_to_lds(wave, in, lanes.address, wave.exec, zero);
    return;
  }
  u64 counted = 0;
  for_lanes(wave.exec, [&](int l) {
    u8 data[16] = {};
    u32 valid = lanes.valid[l];
    if (valid) {
      const u8* from =
          global_access(wave, in, l, lanes.address[l], valid, valid < 4 ? valid : 4, READ, ordering_of(in));
      if (from) memcpy(data, from, valid);
      counted |= 1ull << l;
    }
    load_register(wave, in.op[0].index, l, data, aux);
  });
  count_load(wave, in, lanes.address, counted, bytes);
  issue(wave, VM, &in.op[0]);
}

static void store(Wave& wave, const Inst& in) {
  i64 aux = in.opcode->aux;
  u32 bytes = u32(shape_bytes(aux));
  BufferLanes lanes;
  if (in.mod[mod_offen] || in.mod[mod_idxen]) require_address(wave, in, in.op[in.source]);
  buffer_addresses(wave, in, bytes, lanes);
  u64 counted = 0;
  for_lanes(wave.exec, [&](int l) {
    u8 data[16] = {};
    u32 valid = lanes.valid[l];
    if (!valid) return;
    store_register(wave, in.op[0].index, l, data, aux);
    u8* to = global_access(wave, in, l, lanes.address[l], valid, valid < 4 ? valid : 4, WRITE, ordering_of(in));
    if (to) memcpy(to, data, valid);
    counted |= 1ull << l;
  });
  count_global(wave, in, counted, bytes);
  issue(wave, VM, nullptr);
}

#define LOAD(name, bytes, part) \
  {"buffer_load_" name, load, GLOBAL, ANY_ARCH, memory_shape(bytes, part, false), data_and_buffer}
#define STORE(name, bytes, part) \
  {"buffer_store_" name, store, GLOBAL, ANY_ARCH, memory_shape(bytes, part, true), data_and_buffer}
static const Opcode entries[] = {
    MEMORY_FORMS(LOAD, STORE),
};
extern const Table buffer_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
