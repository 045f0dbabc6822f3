// One lane's access to global memory, checked.
#pragma once
#include "wave.hpp"

namespace emulator {

// How an access takes part in the ordering between workgroups.
enum Ordering { PLAIN, COHERENT, ATOMIC_UPDATE };  // COHERENT: a device-scope (sc1) load or store

// The host address of [address, address + bytes), or null after a finding: the lane must then be skipped.
u8* global_access(Wave& wave, const Inst& in, int lane, u64 address, u32 bytes, u32 alignment, int access,
                  Ordering ordering);

// Publishes the workgroup's released stores at `address` (a device-scope store or atomic), or learns those published
// there. Both are called with the launch's lock held.
void publish(Wave& wave, u64 address);
void learn(Wave& wave, u64 address, Clock& into);

// Counts reads of the same value by one instruction: yields, and in the end reports a spin.
void watch_spin(Wave& wave, const Inst& in, u64 address, u32 value);

void require_address(Wave& wave, const Inst& in, const Operand& op);
void count_global(Wave& wave, const Inst& in, u64 lanes, u32 bytes);
// The same of a load, for a trace also what its lanes share.
void count_load(Wave& wave, const Inst& in, const u64* address, u64 lanes, u32 bytes);
Ordering ordering_of(const Inst& in);

// Moves `bytes` of lane data between memory and registers: sub-word loads extend, d16 forms keep the other half.
enum Part { WHOLE, ZERO_EXTEND, SIGN_EXTENDED, LOW_HALF, LOW_HALF_SIGNED, HIGH_HALF, HIGH_HALF_SIGNED };
constexpr i64 memory_shape(int bytes, Part part, bool store) { return i64(bytes) | i64(part) << 8 | i64(store) << 16; }
inline int shape_bytes(i64 aux) { return int(aux & 255); }
inline Part shape_part(i64 aux) { return Part(aux >> 8 & 255); }
inline bool shape_store(i64 aux) { return aux >> 16 & 1; }
// The loads and stores of every way to address memory but LDS: name, bytes, part.
#define MEMORY_FORMS(LOAD, STORE)                                                                                  \
  LOAD("ubyte", 1, ZERO_EXTEND), LOAD("sbyte", 1, SIGN_EXTENDED), LOAD("ushort", 2, ZERO_EXTEND),                   \
  LOAD("sshort", 2, SIGN_EXTENDED), LOAD("dword", 4, WHOLE), LOAD("dwordx2", 8, WHOLE),                             \
  LOAD("dwordx3", 12, WHOLE), LOAD("dwordx4", 16, WHOLE), LOAD("short_d16", 2, LOW_HALF),                           \
  LOAD("short_d16_hi", 2, HIGH_HALF), LOAD("ubyte_d16", 1, LOW_HALF), LOAD("ubyte_d16_hi", 1, HIGH_HALF),           \
  LOAD("sbyte_d16", 1, LOW_HALF_SIGNED), LOAD("sbyte_d16_hi", 1, HIGH_HALF_SIGNED), STORE("byte", 1, WHOLE),        \
  STORE("short", 2, WHOLE), STORE("byte_d16_hi", 1, HIGH_HALF), STORE("short_d16_hi", 2, HIGH_HALF),                \
  STORE("dword", 4, WHOLE), STORE("dwordx2", 8, WHOLE), STORE("dwordx3", 12, WHOLE),                                \
  STORE("dwordx4", 16, WHOLE)
// Does the operand name as many vector registers as the data needs?
inline bool holds_data(const Operand& op, i64 bytes) {
  return op.kind == VECTOR && op.count == (bytes < 4 ? 1 : bytes / 4);
}
void load_register(Wave& wave, int index, int lane, const u8* from, i64 aux);
void store_register(Wave& wave, int index, int lane, u8* to, i64 aux);

// The address of each lane: of a vector register, from a base of two scalars, or of two vector registers.
void global_addresses(Wave& wave, const Inst& in, const Operand& v, const Operand& s, u64* out);

// A memory-to-LDS load: lane data is read now and written to LDS when it is waited for.
void load_to_lds(Wave& wave, const Inst& in, const u64* address, u64 lanes, u64 zero_lanes);

}  // namespace emulator
