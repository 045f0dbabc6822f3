// LDS loads, stores, transposing loads, and the cross-lane moves that go through the LDS unit.
#include "global.hpp"

namespace emulator {

// aux: bytes | part << 8 | accesses << 16 | offset unit << 20 | transposed element bits << 32
constexpr i64 shape(int bytes, Part part = WHOLE, int accesses = 1, int unit = 1, int transpose = 0) {
  return i64(bytes) | i64(part) << 8 | i64(accesses) << 16 | i64(unit) << 20 | i64(transpose) << 32;
}
static int accesses_of(i64 aux) { return int(aux >> 16 & 15); }
static u32 offset_of(const Inst& in, int access) {
  i64 aux = in.opcode->aux;
  if (accesses_of(aux) == 1) return u32(in.mod[mod_offset]);
  return u32(in.mod[access ? mod_offset1 : mod_offset0] * (aux >> 20 & 0xfff));
}
static u32 alignment_of(u32 bytes) { return bytes == 12 ? 4 : bytes; }

static void addresses(Wave& wave, const Inst& in, const Operand& op, int access, u32* out) {
  u32 room[LANES], offset = offset_of(in, access);
  const u32* base = room;
  if (op.kind == VECTOR)
    base = wave.v[op.index];
  else
    for (int l = 0; l < LANES; l++) room[l] = scalar(wave, op);
  for (int l = 0; l < LANES; l++) out[l] = base[l] + offset;
}

static void read(Wave& wave, const Inst& in) {
  i64 aux = in.opcode->aux;
  u32 bytes = u32(shape_bytes(aux)), address[LANES];
  bool checks = wave.worker->launch->checks;
  require_address(wave, in, in.op[1]);
  u32 first[LANES];
  memcpy(first, wave.v[in.op[1].index], sizeof(first));  // the destination may be the address register
  for (int access = 0; access < accesses_of(aux); access++) {
    for (int l = 0; l < LANES; l++) address[l] = first[l] + offset_of(in, access);
    int index = in.op[0].index + access * int(bytes < 4 ? 1 : bytes / 4);
    for_lanes(wave.exec, [&](int l) {
      static const u8 NOTHING[16] = {};
      const u8* from = NOTHING;
      if (lds_in_bounds(wave, l, address[l], bytes, alignment_of(bytes))) {
        from = wave.worker->lds.bytes + address[l];
        if (checks) lds_check_read(wave, l, address[l], bytes);
      }
      load_register(wave, index, l, from, aux);
    });
    lds_remember(wave, address, wave.exec, bytes, false);
    if (wave.exec) lds_count(wave, in, address, wave.exec, bytes, true);
  }
  issue(wave, LGKM, &in.op[0]);
}

static void write(Wave& wave, const Inst& in) {
  i64 aux = in.opcode->aux;
  u32 bytes = u32(shape_bytes(aux)), address[LANES];
  bool checks = wave.worker->launch->checks;
  require_address(wave, in, in.op[0]);
  for (int access = 0; access < accesses_of(aux); access++) {
    addresses(wave, in, in.op[0], access, address);
    for_lanes(wave.exec, [&](int l) {
      if (!lds_in_bounds(wave, l, address[l], bytes, alignment_of(bytes))) return;
      if (checks) lds_check_write(wave, l, address[l], bytes);
      store_register(wave, in.op[1 + access].index, l, wave.worker->lds.bytes + address[l], aux);
    });
    lds_remember(wave, address, wave.exec, bytes, true);
    if (wave.exec) lds_count(wave, in, address, wave.exec, bytes, false);
  }
  issue(wave, LGKM, nullptr);
}

// Sixteen lanes read a tile of 16 columns whose rows lie in the lanes' data one after another; lane i receives column
// i.
static void read_transposed(Wave& wave, const Inst& in) {
  i64 aux = in.opcode->aux;
  u32 bytes = u32(shape_bytes(aux)), address[LANES];
  int bits = int(aux >> 32), elements = int(bytes) * 8 / bits, per_row = 16 / elements;
  require_address(wave, in, in.op[1]);
  addresses(wave, in, in.op[1], 0, address);
  if (wave.exec != ALL_LANES) report(wave, found_partial_exec_matrix, ~wave.exec, 0, 0);
  u8 data[LANES][16] = {};
  for_lanes(wave.exec, [&](int l) {
    if (!lds_in_bounds(wave, l, address[l], bytes, alignment_of(bytes))) return;
    if (wave.worker->launch->checks) lds_check_read(wave, l, address[l], bytes);
    memcpy(data[l], wave.worker->lds.bytes + address[l], bytes);
  });
  auto element = [&](int lane, int i) {
    int at = i * bits;
    u32 pair = u32(data[lane][at / 8]) | u32(data[lane][at / 8 + 1 < 16 ? at / 8 + 1 : 15]) << 8;
    return (pair >> (at % 8)) & ((1u << bits) - 1);
  };
  for (int l = 0; l < LANES; l++) {
    u32 out[4] = {};
    for (int row = 0; row < elements; row++) {
      int column = l % 16, lane = l / 16 * 16 + row * per_row + column / elements, at = row * bits;
      u64 x = u64(element(lane, column % elements)) << (at % 32);
      out[at / 32] |= u32(x);
      if (at / 32 + 1 < 4) out[at / 32 + 1] |= u32(x >> 32);
    }
    if (wave.exec >> l & 1)
      for (u32 w = 0; w < bytes / 4; w++) wave.v[in.op[0].index + w][l] = out[w];
  }
  lds_remember(wave, address, wave.exec, bytes, false);
  lds_count(wave, in, address, wave.exec, bytes, true);
  issue(wave, LGKM, &in.op[0]);
}

// ds_bpermute: lane l receives the data of lane address / 4; ds_permute: lane l sends its data there, the highest lane
// wins.
static void permute(Wave& wave, const Inst& in) {
  bool pull = in.opcode->aux;
  u32 out[LANES] = {}, address[LANES];
  for (int l = 0; l < LANES; l++) address[l] = wave.v[in.op[1].index][l] + u32(in.mod[mod_offset]);
  const u32* data = wave.v[in.op[2].index];
  for (int l = 0; l < LANES; l++) {
    int other = int(address[l] >> 2 & 63);
    if (pull)
      out[l] = wave.exec >> other & 1 ? data[other] : 0;
    else if (wave.exec >> l & 1)
      out[other] = data[l];
  }
  for_lanes(wave.exec, [&](int l) { wave.v[in.op[0].index][l] = out[l]; });
  issue(wave, LGKM, &in.op[0]);
}

// The 16-bit pattern: bit 15 set is a quad permutation of the low byte; else lane = ((l & and) | or) ^ xor within 32
// lanes.
static void swizzle(Wave& wave, const Inst& in) {
  u32 out[LANES];
  i64 pattern = in.mod[mod_swizzle];
  const u32* data = wave.v[in.op[1].index];
  for (int l = 0; l < LANES; l++) {
    int from = pattern & 0x8000
                   ? (l & ~3) | int(pattern >> (2 * (l & 3)) & 3)
                   : (l & 32) | int((((l & 31) & (pattern & 31)) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31));
    out[l] = wave.exec >> from & 1 ? data[from] : 0;
  }
  for_lanes(wave.exec, [&](int l) { wave.v[in.op[0].index][l] = out[l]; });
  issue(wave, LGKM, &in.op[0]);
}

constexpr const char* WRONG_DATA = "wrong number of registers for the data";
static const char* reads_data(Inst& in) {
  int bytes = shape_bytes(in.opcode->aux) * accesses_of(in.opcode->aux);
  return in.operands == 2 && holds_data(in.op[0], bytes) ? nullptr : WRONG_DATA;
}
static const char* writes_data(Inst& in) {
  int accesses = accesses_of(in.opcode->aux);
  if (in.operands != 1 + accesses) return "wrong number of operands for an LDS store";
  for (int i = 1; i <= accesses; i++)
    if (!holds_data(in.op[i], shape_bytes(in.opcode->aux))) return WRONG_DATA;
  return nullptr;
}

#define READ_OF(name, bytes, part) {"ds_read_" name, read, LDS, ANY_ARCH, shape(bytes, part), reads_data}
#define WRITE_OF(name, bytes, part) {"ds_write_" name, write, LDS, ANY_ARCH, shape(bytes, part), writes_data}
#define PAIRS(name, bytes)                                                                         \
  {"ds_read2_" name, read, LDS, ANY_ARCH, shape(bytes, WHOLE, 2, bytes), reads_data},              \
      {"ds_read2st64_" name, read, LDS, ANY_ARCH, shape(bytes, WHOLE, 2, 64 * bytes), reads_data}, \
      {"ds_write2_" name, write, LDS, ANY_ARCH, shape(bytes, WHOLE, 2, bytes), writes_data}, {     \
    "ds_write2st64_" name, write, LDS, ANY_ARCH, shape(bytes, WHOLE, 2, 64 * bytes), writes_data   \
  }
#define TRANSPOSED(name, bytes, bits) \
  {"ds_read_" name, read_transposed, LDS, GFX950, shape(bytes, WHOLE, 1, 1, bits), reads_data}

static const Opcode entries[] = {
    READ_OF("u8", 1, ZERO_EXTEND),
    READ_OF("i8", 1, SIGN_EXTENDED),
    READ_OF("u16", 2, ZERO_EXTEND),
    READ_OF("i16", 2, SIGN_EXTENDED),
    READ_OF("b32", 4, WHOLE),
    READ_OF("b64", 8, WHOLE),
    READ_OF("b96", 12, WHOLE),
    READ_OF("b128", 16, WHOLE),
    READ_OF("u8_d16", 1, LOW_HALF),
    READ_OF("u8_d16_hi", 1, HIGH_HALF),
    READ_OF("i8_d16", 1, LOW_HALF_SIGNED),
    READ_OF("i8_d16_hi", 1, HIGH_HALF_SIGNED),
    READ_OF("u16_d16", 2, LOW_HALF),
    READ_OF("u16_d16_hi", 2, HIGH_HALF),
    WRITE_OF("b8", 1, WHOLE),
    WRITE_OF("b8_d16_hi", 1, HIGH_HALF),
    WRITE_OF("b16", 2, WHOLE),
    WRITE_OF("b16_d16_hi", 2, HIGH_HALF),
    WRITE_OF("b32", 4, WHOLE),
    WRITE_OF("b64", 8, WHOLE),
    WRITE_OF("b96", 12, WHOLE),
    WRITE_OF("b128", 16, WHOLE),
    PAIRS("b32", 4),
    PAIRS("b64", 8),
    TRANSPOSED("b64_tr_b16", 8, 16),
    TRANSPOSED("b64_tr_b8", 8, 8),
    TRANSPOSED("b64_tr_b4", 8, 4),
    TRANSPOSED("b96_tr_b6", 12, 6),
    {"ds_bpermute_b32", permute, LDS, ANY_ARCH, 1, nullptr},
    {"ds_permute_b32", permute, LDS, ANY_ARCH, 0, nullptr},
    {"ds_swizzle_b32", swizzle, LDS, ANY_ARCH, 0, nullptr},
};
extern const Table lds_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
