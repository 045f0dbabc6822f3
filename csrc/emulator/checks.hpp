// A sanitizer finding, and the list that collects findings.
#pragma once
#include "base.hpp"

namespace emulator {

// One name per rule; csrc/emulator/README.md has the rule itself.
#define EMULATOR_FINDINGS(X)                                                                                   \
  X(register_before_wait)                                                                                      \
  X(lds_race)                                                                                                  \
  X(lds_in_flight)                                                                                             \
  X(lds_out_of_bounds)                                                                                         \
  X(lds_misaligned)                                                                                            \
  X(lds_uninitialised)                                                                                         \
  X(global_out_of_bounds) X(global_misaligned) X(global_uninitialised) X(global_read_only) X(global_unordered) \
      X(divergent_barrier) X(partial_exec_matrix) X(uninitialised_address) X(spin) X(instruction_limit)        \
          X(bad_resource) X(rounding_mode) X(scratch_out_of_bounds) X(global_unwritten)
enum FindingKind {
#define X(name) found_##name,
  EMULATOR_FINDINGS(X)
#undef X
      FINDING_KINDS
};

// The first occurrence at (kind, pc), and how many there were. `detail` is the other party: a wave, a workgroup, a
// register or a size. A finding about the launch as a whole has pc -1 - view, so that each buffer has its own.
struct Finding {
  i32 kind, pc, wave, other;
  i64 workgroup, detail;
  u64 lanes, address, count;
};

constexpr int MAX_FINDINGS = 64;

struct FindingList {
  Finding at[MAX_FINDINGS];
  int size;
  // Keeps the occurrence in the lowest workgroup, so that the report does not depend on the threads.
  void merge(const FindingList& from) {
    for (int i = 0; i < from.size; i++) {
      const Finding& f = from.at[i];
      int known = 0;
      while (known < size && (at[known].kind != f.kind || at[known].pc != f.pc)) known++;
      if (known == size) {
        if (size < MAX_FINDINGS) at[size++] = f;
        continue;
      }
      u64 count = at[known].count + f.count;
      if (f.workgroup < at[known].workgroup) at[known] = f;
      at[known].count = count;
    }
  }
  void add(const Finding& f) {
    for (int i = 0; i < size; i++)
      if (at[i].kind == f.kind && at[i].pc == f.pc) {
        at[i].count += f.count;
        if (at[i].workgroup == f.workgroup && at[i].wave == f.wave) at[i].lanes |= f.lanes;
        return;
      }
    if (size < MAX_FINDINGS) at[size++] = f;
  }
};

struct Wave;
void report(Wave& wave, FindingKind kind, u64 lanes, u64 address, i64 detail);

}  // namespace emulator
