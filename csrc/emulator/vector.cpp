// Operands of the vector unit: broadcast, DPP, SDWA, and masked results.
#include "vector.hpp"

namespace emulator {

enum SdwaSelect { BYTE_0, BYTE_1, BYTE_2, BYTE_3, WORD_0, WORD_1, DWORD };
enum SdwaUnused { UNUSED_PAD, UNUSED_SEXT, UNUSED_PRESERVE };

static u32 sdwa_select(u32 x, i64 select, bool extend) {
  if (select <= BYTE_3) {
    u32 byte = x >> (8 * select) & 255;
    return extend ? u32(i32(i8(byte))) : byte;
  }
  if (select <= WORD_1) {
    u32 half = x >> (16 * (select - WORD_0)) & 0xffff;
    return extend ? u32(i32(i16(half))) : half;
  }
  return x;
}

static u32 sdwa_merge(u32 old, u32 x, i64 select, i64 unused) {
  if (select == DWORD) return x;
  int shift = select <= BYTE_3 ? 8 * int(select) : 16 * int(select - WORD_0), bits = select <= BYTE_3 ? 8 : 16;
  u32 mask = ((1u << bits) - 1) << shift, field = x << shift & mask;
  if (unused == UNUSED_PRESERVE) return (old & ~mask) | field;
  if (unused == UNUSED_SEXT && (field >> (shift + bits - 1) & 1)) return field | ~(mask | (mask - 1));
  return field;
}

const u32* source_row(Wave& wave, const Inst& in, int k, u32* room) {
  const Operand& op = in.op[k];
  const u32* row;
  if (op.kind == VECTOR) {
    row = wave.v[op.index];
  } else {
    u32 x = scalar(wave, op);
    for (int l = 0; l < LANES; l++) room[l] = x;
    row = room;
  }
  if (in.plain) return row;
  if (in.mod[mod_sdwa] && k - in.source < 2) {
    i64 select = in.mod[k == in.source ? mod_src0_sel : mod_src1_sel];
    for (int l = 0; l < LANES; l++) room[l] = sdwa_select(row[l], select, op.flags & SIGN_EXTEND);
    return room;
  }
  if (in.mod[mod_dpp] && k == in.source) {
    u32 moved[LANES];
    for (int l = 0; l < LANES; l++) {
      int from = in.lane_from[l];
      moved[l] = from >= 0 && (wave.exec >> from & 1) ? row[from] : 0;
    }
    memcpy(room, moved, sizeof(moved));
    return room;
  }
  return row;
}

void source_pair(Wave& wave, const Inst& in, int k, u64* out) {
  const Operand& op = in.op[k];
  if (op.kind == VECTOR) {
    for (int l = 0; l < LANES; l++) out[l] = u64(wave.v[op.index + 1][l]) << 32 | wave.v[op.index][l];
  } else {
    u64 x = scalar64(wave, op);
    for (int l = 0; l < LANES; l++) out[l] = x;
  }
  if (in.mod[mod_dpp] && k == in.source) {
    u64 moved[LANES];
    for (int l = 0; l < LANES; l++) {
      int from = in.lane_from[l];
      moved[l] = from >= 0 && (wave.exec >> from & 1) ? out[from] : 0;
    }
    memcpy(out, moved, sizeof(moved));
  }
}

u64 writing_lanes(const Wave& wave, const Inst& in) {
  if (!in.mod[mod_dpp]) return wave.exec;
  u64 lanes = wave.exec & in.lane_writes;
  if (!in.mod[mod_bound_ctrl])
    for (int l = 0; l < LANES; l++) {
      int from = in.lane_from[l];
      if (from < 0 || !(wave.exec >> from & 1)) lanes &= ~(1ull << l);
    }
  return lanes;
}

u32* direct_row(Wave& wave, const Inst& in) {
  if (!in.plain || wave.exec != ALL_LANES) return nullptr;
  wave.defined[in.op[0].index] = true;
  return wave.v[in.op[0].index];
}

void commit_row(Wave& wave, const Inst& in, int offset, const u32* result, bool real_result) {
  u32* row = wave.v[in.op[0].index + offset];
  wave.defined[in.op[0].index + offset] = true;
  if (in.plain && wave.exec == ALL_LANES) {
    memcpy(row, result, sizeof(u32) * LANES);
    return;
  }
  bool scaled = real_result && (in.mod[mod_mul] || in.mod[mod_div] || in.mod[mod_clamp]);
  for_lanes(writing_lanes(wave, in), [&](int l) {
    u32 x = result[l];
    if (scaled) {
      float f = real(x);
      if (in.mod[mod_mul]) f *= float(in.mod[mod_mul]);
      if (in.mod[mod_div]) f /= float(in.mod[mod_div]);
      if (wave.flush32) f = flush(f);
      if (in.mod[mod_clamp]) f = f > 0 ? (f < 1 ? f : 1.0f) : 0.0f;
      x = word(f);
    }
    row[l] = in.mod[mod_sdwa] ? sdwa_merge(row[l], x, in.mod[mod_dst_sel], in.mod[mod_dst_unused]) : x;
  });
}

void commit_pair(Wave& wave, const Inst& in, const u64* result) {
  u32 *low = wave.v[in.op[0].index], *high = wave.v[in.op[0].index + 1];
  wave.defined[in.op[0].index] = wave.defined[in.op[0].index + 1] = true;
  for_lanes(writing_lanes(wave, in), [&](int l) {
    low[l] = u32(result[l]);
    high[l] = u32(result[l] >> 32);
  });
}

// A 16-bit result clears the upper half. The few instructions marked PRESERVES_HIGH, and any that writes the upper
// half, keep the other one.
void commit_half(Wave& wave, const Inst& in, const u16* result) {
  u32* row = wave.v[in.op[0].index];
  wave.defined[in.op[0].index] = true;
  int shift = in.mod[mod_op_sel] >> (in.operands - in.source) & 1 ? 16 : 0;
  for_lanes(writing_lanes(wave, in), [&](int l) {
    if (in.mod[mod_sdwa]) {
      row[l] = sdwa_merge(row[l], result[l], in.mod[mod_dst_sel], in.mod[mod_dst_unused]);
    } else if (shift) {
      row[l] = (row[l] & 0xffff) | u32(result[l]) << 16;
    } else {
      row[l] = (in.opcode->aux == PRESERVES_HIGH ? row[l] & 0xffff0000 : 0) | result[l];
    }
  });
}

const char* accumulate_into_destination(Inst& in) {
  in.op[in.operands] = in.op[0];
  in.op[in.operands].flags = 0;
  in.operands++;
  return nullptr;
}

}  // namespace emulator
