// A decoded program: records as the Python front end writes them, instructions as the wavefront executes them, and the
// table's entry.
#pragma once
#include "base.hpp"

namespace emulator {

struct Wave;
struct Inst;
using Handler = void (*)(Wave&, const Inst&);

enum OperandKind { NO_OPERAND, VECTOR, SCALAR, LITERAL, OFF };
enum OperandFlag { NEGATE = 1, ABSOLUTE = 2, SIGN_EXTEND = 4, FLOAT_LITERAL = 8 };
struct Operand {
  i32 kind, index, count, flags;
  u64 literal;  // the 32 bits an ordinary operand sees
  u64 wide;     // the 64 bits a wide operand sees; a double if FLOAT_LITERAL
};

// Every modifier of every encoding has one slot. The front end asks for the names, so they are written here only.
#define EMULATOR_MODIFIERS(X)                                                                                        \
  X(offset)                                                                                                          \
  X(offset0)                                                                                                         \
  X(offset1)                                                                                                         \
  X(sc0)                                                                                                             \
  X(sc1)                                                                                                             \
  X(nt)                                                                                                              \
  X(lds) X(offen) X(idxen) X(clamp) X(mul) X(div) X(op_sel) X(op_sel_hi) X(neg_lo) X(neg_hi) X(quad_perm) X(row_shl) \
      X(row_shr) X(row_ror) X(row_newbcast) X(row_bcast) X(row_mirror) X(row_half_mirror) X(wave_shl) X(wave_shr)    \
          X(wave_rol) X(wave_ror) X(row_mask) X(bank_mask) X(bound_ctrl) X(dst_sel) X(dst_unused) X(src0_sel)        \
              X(src1_sel) X(cbsz) X(abid) X(blgp) X(bitop3) X(swizzle) X(vmcnt) X(lgkmcnt) X(expcnt) X(target)       \
                  X(hwreg) X(has_op_sel_hi) X(sdwa) X(dpp) X(gds) X(fi)
enum Modifier {
#define X(name) mod_##name,
  EMULATOR_MODIFIERS(X)
#undef X
      MODIFIERS
};

constexpr int MAX_OPERANDS = 6;
struct Record {
  i32 opcode, operands;
  Operand op[MAX_OPERANDS];
  i64 modifier[MODIFIERS];
};

enum Class { SALU, SMEM, VALU, TRANSCENDENTAL, MATRIX, LDS, GLOBAL, ATOMIC, CONTROL };

// One line per instruction. `aux` is an argument for a handler that several instructions share; `prepare` runs once
// at decoding and returns a sentence when the operands make no sense.
struct Opcode {
  const char* name;
  Handler run;
  Class group;
  int arch;
  i64 aux;
  const char* (*prepare)(Inst&);
};

struct Inst {
  Handler run;
  const Opcode* opcode;
  int operands, arch;
  Operand op[MAX_OPERANDS];
  i64 mod[MODIFIERS];
  i32 pc;
  int source;           // index of the first source operand
  bool plain;           // no DPP, SDWA, clamp or output modifier: the fast path of the vector unit
  bool loads;           // writes its destination through a counter (memory): same-counter overwrites return in order
  i8 lane_from[LANES];  // DPP: the lane read, or -1
  u64 lane_writes;      // DPP: row_mask and bank_mask
  int ranges;
  struct Range {
    u16 first, count;
  } range[MAX_OPERANDS];  // registers named; scalars follow the vectors
  i32 cost;               // passes of the matrix unit
};

struct Program {
  Inst* code;
  int size, arch;
};

int find_opcode(const char* name);  // -1 if the table has no such line
const Opcode* opcode_at(int index);

struct Table {
  const Opcode* entries;
  int size;
};
#define EMULATOR_TABLES(X)                                                                                 \
  X(scalar_table)                                                                                          \
  X(scalar_compare_table)                                                                                  \
  X(control_table)                                                                                         \
  X(scalar_memory_table)                                                                                   \
  X(integer_table)                                                                                         \
  X(real_table)                                                                                            \
  X(convert_table) X(scaled_convert_table) X(compare_table) X(packed_table) X(wide_table) X(select_table)  \
      X(cross_lane_table) X(matrix_table) X(lds_table) X(lds_atomic_table) X(global_table) X(buffer_table) \
          X(atomic_table) X(scratch_table)
#define X(name) extern const Table name;
EMULATOR_TABLES(X)
#undef X

}  // namespace emulator
