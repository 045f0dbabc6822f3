// The state of a wavefront, of the workgroup it belongs to, of the host thread that runs it, and of the whole launch.
#pragma once
#include "checks.hpp"
#include "lds.hpp"
#include "memory.hpp"
#include "ordering.hpp"
#include "program.hpp"
#include "timeline.hpp"

namespace emulator {

enum Counter { VM, LGKM };                  // vmcnt, lgkmcnt
constexpr u32 COUNTER_LIMIT[2] = {63, 15};  // a counter that is full stalls the issue, and compilers rely on it
constexpr int LANDINGS = 64;                // as many as vmcnt can count

// The effect of waiting for a memory operation, beyond its registers becoming readable.
struct Landing {
  enum Kind { NOTHING, LDS_WRITE, WRITE_BACK, ACQUIRE } kind;
  u32 sequence;
  u64 lanes;
  u32 bytes;
  u32 epoch, others_epoch;  // a write-back releases these epochs of its own wave and of the others
  u32 address[LANES];
  u8 data[LANES][16];
  Clock learned;
};

struct Launch;
struct Worker;

struct Workgroup {
  u32 index, id[3];               // position in the grid's linear order; coordinates
  u32 position;                   // index in the order of execution
  u32 epoch, interval_epoch;      // the current one of stores; the first of this barrier interval
  bool stored;                    // a store was made since the epoch began
  u32 released[WAVES_PER_GROUP];  // per wave: stores of earlier epochs are written back
  Clock known, safe;              // the whole workgroup's: learned from atomics; learned and invalidated
  int waves;
};

struct Wave {
  alignas(64) u32 v[VECTORS][LANES];
  u32 s[SCALARS];
  u64 exec;  // mirror of s[EXEC], s[EXEC + 1]
  bool scc, ended, at_barrier, yielded;
  i32 pc, id;
  u32 mode;  // the MODE register: rounding, denormals, fp16 overflow
  bool flush32, flush16;
  u32 issued[2], retired[2];
  u32 scalar_load;  // sequence of the last scalar load: these return out of order
  u32 pending[2][VECTORS + SCALARS];
  bool defined[VECTORS];
  Landing* landings;  // a ring of LANDINGS, in order of issue; all of them count in vmcnt
  u32 landing_first, landing_count;
  LdsAccess* lds_accesses;  // a ring of LDS_ACCESSES, in order of issue; they count in lgkmcnt
  u32 lds_first, lds_count;
  Clock known, safe;  // since the last barrier, beyond the workgroup's
  u64 instructions;
  struct {
    i32 pc;
    u64 address;
    u32 value, times;
  } spin;
  Workgroup* group;
  Worker* worker;

  void set_scalar(int index, u32 value) {
    s[index] = value;
    if (index >= EXEC) exec = u64(s[EXEC + 1]) << 32 | s[EXEC];
  }
  void set_exec(u64 mask) {
    exec = mask;
    s[EXEC] = u32(mask);
    s[EXEC + 1] = u32(mask >> 32);
  }
  u64 scalar64(int index) const { return u64(s[index + 1]) << 32 | s[index]; }
  void set_scalar64(int index, u64 value) {
    set_scalar(index, u32(value));
    set_scalar(index + 1, u32(value >> 32));
  }
  void set_mode(u32 value) {
    mode = value;
    flush32 = (value >> 4 & 3) != 3;
    flush16 = (value >> 6 & 3) != 3;
  }
};

// Per instruction of the program; one copy per worker, added up at the end.
struct PcCounts {
  u64 times, lanes, global_bytes, lds_bytes, lds_clocks_128, lds_clocks_256;
};

constexpr u64 ALL_BYTES = ~0ull;

struct Worker {
  Launch* launch;
  int id;
  Workgroup group;
  Lds lds;
  Wave* waves;  // 16 of them
  PcCounts* counts;
  BankMemo* banks;
  List<Event>* traces;  // per wave of the workgroup, then of the one played last; null without models of time
  i64 played;           // the workgroup played last, or -1
  u64 fetched;          // bytes that the instruction's load takes of memory, or ALL_BYTES
  u64* loaded;  // bytes per view
  u64* stored;
  u8* scratch;     // private memory of the waves' lanes
  Region* region;  // the last access's
  FindingList findings;
  u32 running;   // position in the order of the workgroup now running, or ~0
  bool abandon;  // the workgroup cannot go on
};

struct Launch {
  const Program* program;
  u32 grid[3], block[3], lds_bytes, scratch_bytes;
  bool checks, ids[3], reverse_waves;
  u64 spin_limit, instruction_limit;
  u32 mode, user_scalars;
  const u32* user_scalar;
  const u32* order;  // workgroup indices in order of execution, or null
  u64 workgroups;
  Memory memory;
  TagLayout tags;
  SyncVariables sync;
  pthread_mutex_t lock;  // atomics and everything they order
  u32 next;
  bool stop;
  Worker* workers;
  int threads;
  const TimeModel* model;  // several; none: nothing is traced
  u32 models;
  GroupTime* times;  // by model, then by the workgroup's linear index
  // For single instructions: registers and LDS before and after; null in an ordinary launch.
  const u32* initial_vectors;
  const u32* initial_scalars;
  u32* final_vectors;
  u32* final_scalars;
  u8* initial_lds;
  u8* final_lds;
};

void issue(Wave& wave, Counter counter, const Operand* destination);
Landing& issue_landing(Wave& wave, Landing::Kind kind, const Operand* destination = nullptr);  // counts in vmcnt
void wait(Wave& wave, Counter counter, u32 outstanding);
void check_registers(Wave& wave, const Inst& in);
void run_workgroup(Worker& worker, u32 index, u32 position);

inline u32 scalar(const Wave& wave, const Operand& op) {
  return op.kind == SCALAR ? wave.s[op.index] : u32(op.literal);
}
inline u64 scalar64(const Wave& wave, const Operand& op) {
  return op.kind == SCALAR ? wave.scalar64(op.index) : op.wide;
}
// 4 or 8 bytes of a lane, from vector register `index` on.
inline u64 lane_data(const Wave& wave, int index, u32 bytes, int lane) {
  return (bytes == 8 ? u64(wave.v[index + 1][lane]) << 32 : 0) | wave.v[index][lane];
}

}  // namespace emulator
