// Global and flat loads and stores, and loads that go straight to LDS.
#include "global.hpp"

namespace emulator {

void load_register(Wave& wave, int index, int lane, const u8* from, i64 aux) {
  int bytes = shape_bytes(aux);
  u32* row = wave.v[index];
  if (bytes >= 4) {
    for (int i = 0; i < bytes / 4; i++) memcpy(&wave.v[index + i][lane], from + 4 * i, 4);
    return;
  }
  u16 raw = 0;
  memcpy(&raw, from, size_t(bytes));
  u32 extended = bytes == 1 ? u32(i32(i8(raw))) : u32(i32(i16(raw)));
  switch (shape_part(aux)) {
    case WHOLE:
    case ZERO_EXTEND:
      row[lane] = raw;
      break;
    case SIGN_EXTENDED:
      row[lane] = extended;
      break;
    case LOW_HALF:
      row[lane] = (row[lane] & 0xffff0000) | raw;
      break;
    case LOW_HALF_SIGNED:
      row[lane] = (row[lane] & 0xffff0000) | (extended & 0xffff);
      break;
    case HIGH_HALF:
      row[lane] = (row[lane] & 0xffff) | u32(raw) << 16;
      break;
    case HIGH_HALF_SIGNED:
      row[lane] = (row[lane] & 0xffff) | extended << 16;
      break;
  }
}

void store_register(Wave& wave, int index, int lane, u8* to, i64 aux) {
  int bytes = shape_bytes(aux);
  if (bytes >= 4) {
    for (int i = 0; i < bytes / 4; i++) memcpy(to + 4 * i, &wave.v[index + i][lane], 4);
    return;
  }
  u32 x = wave.v[index][lane] >> (shape_part(aux) == HIGH_HALF ? 16 : 0);
  memcpy(to, &x, size_t(bytes));
}

void global_addresses(Wave& wave, const Inst& in, const Operand& v, const Operand& s, u64* out) {
  i64 offset = in.mod[mod_offset];
  if (s.kind == SCALAR) {
    u64 base = wave.scalar64(s.index) + u64(offset);
    for (int l = 0; l < LANES; l++) out[l] = base + wave.v[v.index][l];
  } else {
    for (int l = 0; l < LANES; l++) out[l] = (u64(wave.v[v.index + 1][l]) << 32 | wave.v[v.index][l]) + u64(offset);
  }
}

static u32 alignment_of(u32 bytes) { return bytes < 4 ? bytes : 4; }

static void load(Wave& wave, const Inst& in) {
  u64 address[LANES];
  bool flat = in.operands == 2;
  require_address(wave, in, in.op[1]);
  global_addresses(wave, in, in.op[1], in.op[2], address);
  i64 aux = in.opcode->aux;
  u32 bytes = u32(shape_bytes(aux));
  Ordering ordering = ordering_of(in);
  count_load(wave, in, address, wave.exec, bytes);
  Clock learned = {};
  for_lanes(wave.exec, [&](int l) {
    const u8* from = global_access(wave, in, l, address[l], bytes, alignment_of(bytes), READ, ordering);
    static const u8 NOTHING[16] = {};
    if (ordering == COHERENT && from) {
      pthread_mutex_lock(&wave.worker->launch->lock);
      learn(wave, address[l], learned);
      load_register(wave, in.op[0].index, l, from, aux);
      pthread_mutex_unlock(&wave.worker->launch->lock);
      if (l == first_lane(wave.exec)) watch_spin(wave, in, address[l], wave.v[in.op[0].index][l]);
    } else {
      load_register(wave, in.op[0].index, l, from ? from : NOTHING, aux);
    }
  });
  if (learned.entries.size)
    issue_landing(wave, Landing::ACQUIRE, &in.op[0]).learned = learned;
  else
    issue(wave, VM, &in.op[0]);
  if (flat) issue(wave, LGKM, &in.op[0]);
}

static void store(Wave& wave, const Inst& in) {
  u64 address[LANES];
  bool flat = in.operands == 2;
  require_address(wave, in, in.op[0]);
  global_addresses(wave, in, in.op[0], in.op[2], address);
  i64 aux = in.opcode->aux;
  u32 bytes = u32(shape_bytes(aux));
  Ordering ordering = ordering_of(in);
  count_global(wave, in, wave.exec, bytes);
  for_lanes(wave.exec, [&](int l) {
    u8* to = global_access(wave, in, l, address[l], bytes, alignment_of(bytes), WRITE, ordering);
    if (!to) return;
    if (ordering == COHERENT) {
      pthread_mutex_lock(&wave.worker->launch->lock);
      publish(wave, address[l]);
      store_register(wave, in.op[1].index, l, to, aux);
      pthread_mutex_unlock(&wave.worker->launch->lock);
    } else {
      store_register(wave, in.op[1].index, l, to, aux);
    }
  });
  issue(wave, VM, nullptr);
  if (flat) issue(wave, LGKM, nullptr);
}

void load_to_lds(Wave& wave, const Inst& in, const u64* address, u64 lanes, u64 zero_lanes) {
  u32 bytes = u32(shape_bytes(in.opcode->aux)), base = wave.s[M0] + u32(in.mod[mod_offset]);
  bool checks = wave.worker->launch->checks;
  count_load(wave, in, address, lanes & ~zero_lanes, bytes);
  Landing& landing = issue_landing(wave, Landing::LDS_WRITE);
  landing.lanes = 0;
  landing.bytes = bytes < 4 ? 4 : bytes;
  u32 to[LANES] = {};
  for_lanes(lanes, [&](int l) {
    to[l] = base + u32(l) * landing.bytes;
    memset(landing.data[l], 0, 16);
    if (!(zero_lanes >> l & 1)) {
      const u8* from = global_access(wave, in, l, address[l], bytes, alignment_of(bytes), READ, PLAIN);
      if (from) memcpy(landing.data[l], from, bytes);
    }
    if (!lds_in_bounds(wave, l, to[l], landing.bytes, 4)) return;  // whole dwords: Triton pads copies of 16 bytes by 8
    landing.lanes |= 1ull << l;
    landing.address[l] = to[l];
    if (checks) {
      lds_check_write(wave, l, to[l], landing.bytes);
      memset(wave.worker->lds.in_flight + to[l], DIRECT | (wave.id + 1), landing.bytes);
    }
  });
  if (lanes) lds_count(wave, in, to, lanes, landing.bytes, false);
}

static void load_lds(Wave& wave, const Inst& in) {
  u64 address[LANES];
  require_address(wave, in, in.op[0]);
  global_addresses(wave, in, in.op[0], in.op[1], address);
  load_to_lds(wave, in, address, wave.exec, 0);
}

constexpr const char* WRONG_DATA = "wrong number of registers for the data";
static const char* loads_data(Inst& in) {
  return holds_data(in.op[0], shape_bytes(in.opcode->aux)) ? nullptr : WRONG_DATA;
}
static const char* stores_data(Inst& in) {
  return holds_data(in.op[1], shape_bytes(in.opcode->aux)) ? nullptr : WRONG_DATA;
}

#define LOAD(name, bytes, part)                                                                  \
  {"global_load_" name, load, GLOBAL, ANY_ARCH, memory_shape(bytes, part, false), loads_data}, { \
    "flat_load_" name, load, GLOBAL, ANY_ARCH, memory_shape(bytes, part, false), loads_data      \
  }
#define STORE(name, bytes, part)                                                                   \
  {"global_store_" name, store, GLOBAL, ANY_ARCH, memory_shape(bytes, part, true), stores_data}, { \
    "flat_store_" name, store, GLOBAL, ANY_ARCH, memory_shape(bytes, part, true), stores_data      \
  }
#define LOAD_LDS(name, bytes, arch) \
  {"global_load_lds_" name, load_lds, GLOBAL, arch, memory_shape(bytes, WHOLE, false), nullptr}

static const Opcode entries[] = {
    MEMORY_FORMS(LOAD, STORE),
    LOAD_LDS("ubyte", 1, ANY_ARCH),
    LOAD_LDS("ushort", 2, ANY_ARCH),
    LOAD_LDS("dword", 4, ANY_ARCH),
    LOAD_LDS("dwordx3", 12, GFX950),
    LOAD_LDS("dwordx4", 16, GFX950),
};
extern const Table global_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
