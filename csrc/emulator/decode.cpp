// From the front end's records to instructions: opcode, literals, DPP lane maps, and the registers each instruction
// names.
#include "decode.hpp"

namespace emulator {

static const Table* const TABLES[] = {
#define X(name) &name,
    EMULATOR_TABLES(X)
#undef X
};
constexpr int TABLE_COUNT = sizeof(TABLES) / sizeof(TABLES[0]);

const Opcode* opcode_at(int index) {
  for (int t = 0; t < TABLE_COUNT; t++) {
    if (index < TABLES[t]->size) return index < 0 ? nullptr : &TABLES[t]->entries[index];
    index -= TABLES[t]->size;
  }
  return nullptr;
}
int find_opcode(const char* name) {
  int base = 0;
  for (int t = 0; t < TABLE_COUNT; base += TABLES[t]->size, t++)
    for (int i = 0; i < TABLES[t]->size; i++)
      if (!strcmp(TABLES[t]->entries[i].name, name)) return base + i;
  return -1;
}

static int dpp_source(const Inst& in, int lane) {
  const i64* m = in.mod;
  int row = lane & ~15, i = lane & 15;
  // Values arrive as value + 1, so that 0 means "not named".
  if (m[mod_quad_perm]) return (lane & ~3) | int((m[mod_quad_perm] - 1) >> (2 * (lane & 3)) & 3);
  if (m[mod_row_shl]) {
    int s = int(m[mod_row_shl] - 1);
    return i + s < 16 ? lane + s : -1;
  }
  if (m[mod_row_shr]) {
    int s = int(m[mod_row_shr] - 1);
    return i - s >= 0 ? lane - s : -1;
  }
  if (m[mod_row_ror]) {
    int s = int(m[mod_row_ror] - 1);
    return row + ((i - s) & 15);
  }
  if (m[mod_row_newbcast]) return row + int(m[mod_row_newbcast] - 1);
  if (m[mod_row_bcast]) return m[mod_row_bcast] - 1 == 15 ? (lane < 16 ? -1 : row - 1) : (lane < 32 ? -1 : 31);
  if (m[mod_row_mirror]) return row + 15 - i;
  if (m[mod_row_half_mirror]) return (lane & ~7) + 7 - (lane & 7);
  if (m[mod_wave_shl]) return lane + 1 < LANES ? lane + 1 : -1;
  if (m[mod_wave_shr]) return lane ? lane - 1 : -1;
  if (m[mod_wave_rol]) return (lane + 1) & 63;
  if (m[mod_wave_ror]) return (lane - 1) & 63;
  return lane;
}

static void fix_literal(Operand& op) {
  if (op.kind != LITERAL) return;
  op.literal = op.flags & FLOAT_LITERAL ? bit_cast<u32>(float(bit_cast<double>(op.wide))) : u32(op.wide);
  u32 sign = op.flags & NEGATE ? 0x80000000 : 0;  // a negated constant under an explicit modifier
  if (op.flags & ABSOLUTE) op.literal &= 0x7fffffff;
  op.literal ^= sign;
}

static const char* check_registers_exist(const Operand& op) {
  if (op.kind == VECTOR && (op.index < 0 || op.count < 1 || op.index + op.count > VECTORS))
    return "a vector register out of range";
  if (op.kind == SCALAR && (op.index < 0 || op.count < 1 || op.index + op.count > SCALARS))
    return "a scalar register out of range";
  return nullptr;
}

static const char* decode(Inst& in, const Record& record, int pc, int arch) {
  const Opcode* opcode = opcode_at(record.opcode);
  if (!opcode) return "unknown instruction";
  if (!(opcode->arch & arch)) return "this instruction does not exist on the architecture";
  in.run = opcode->run;
  in.opcode = opcode;
  in.arch = arch;
  in.pc = pc;
  in.operands = record.operands;
  in.source = 1;
  memcpy(in.op, record.op, sizeof(in.op));
  memcpy(in.mod, record.modifier, sizeof(in.mod));
  for (int i = 0; i < in.operands; i++) {
    if (const char* wrong = check_registers_exist(in.op[i])) return wrong;
    fix_literal(in.op[i]);
    if (in.op[i].kind != VECTOR && in.op[i].kind != SCALAR) continue;
    u16 first = u16(in.op[i].index + (in.op[i].kind == SCALAR ? VECTORS : 0));
    in.range[in.ranges++] = Inst::Range{first, u16(in.op[i].count)};
  }
  const i64* m = in.mod;
  bool memory =
      opcode->group == LDS || opcode->group == GLOBAL || opcode->group == Class::ATOMIC || opcode->group == SMEM;
  in.loads = memory && !m[mod_lds] && (strstr(opcode->name, "load") || strstr(opcode->name, "read"));
  in.plain = !(m[mod_dpp] || m[mod_sdwa] || m[mod_clamp] || m[mod_mul] || m[mod_div]);
  if (m[mod_gds]) return "the global data share is not modelled";
  bool clamps = strstr(opcode->name, "f32") || strstr(opcode->name, "fma_mix") || !strcmp(opcode->name, "v_add_u32") ||
                !strcmp(opcode->name, "v_sub_u32") || !strcmp(opcode->name, "v_subrev_u32");
  if (m[mod_clamp] && opcode->group == VALU && !clamps)
    return "clamp is modelled for f32 results and for v_add_u32, v_sub_u32 and v_subrev_u32 only";
  in.lane_writes = 0;
  for (int lane = 0; lane < LANES; lane++) {
    in.lane_from[lane] = i8(dpp_source(in, lane));
    if ((m[mod_row_mask] >> (lane / 16) & 1) && (m[mod_bank_mask] >> (lane / 4 % 4) & 1))
      in.lane_writes |= 1ull << lane;
  }
  return opcode->prepare ? opcode->prepare(in) : nullptr;
}

Program* build_program(const Record* records, int count, int arch, int* bad, const char** reason) {
  Program* program = allocate<Program>(1);
  program->code = allocate<Inst>(u64(count));
  program->size = count;
  program->arch = arch;
  for (int pc = 0; pc < count; pc++) {
    const char* wrong = decode(program->code[pc], records[pc], pc, arch);
    if (!wrong) continue;
    *bad = pc;
    *reason = wrong;
    free_program(program);
    return nullptr;
  }
  return program;
}

void free_program(Program* program) {
  free(program->code);
  free(program);
}

}  // namespace emulator
