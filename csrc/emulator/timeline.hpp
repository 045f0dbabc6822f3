// The model of time: what a compute unit does clock by clock with the instructions that its waves executed.
// ../../docs/amd_time_model.md says what is modelled and what is not; mla_suite/emulator/timing.py has the constants.
#pragma once
#include "base.hpp"

namespace emulator {

struct Program;

// All in clocks and bytes per clock of one compute unit; timing.py mirrors the fields.
struct TimeModel {
  double issue;           // from one instruction of a wave to its next
  double vector_latency;  // from a vector instruction to a dependent one
  double transcendental;  // of the vector unit per instruction; the rest take `issue`
  double matrix_extra;    // from the last pass to a dependent instruction
  double branch;          // a taken branch
  double lds_latency;     // beside the clocks that the banks take
  double lds_rate;        // bank clocks per clock: 1, or what a wider LDS gains
  double lds_direct;      // bytes per clock that a load to LDS writes
  double memory_latency;
  double scalar_latency;
  double memory_rate;  // what this compute unit draws at most
  double chip_rate;    // its share of the chip's memory, at the highest clock
  double slowdown;     // what the clock loses of itself under full matrix load; memory keeps its rate
  double cache_rate;   // bytes per clock that its first-level cache passes
  double barrier;
  u32 simds;
  u32 copies;  // workgroups that share the compute unit; each plays the same trace
};

// One instruction that a wave executed, with what its operands decided. Of the bytes of all lanes, `fetched` has those
// that lanes share once.
struct Event {
  i32 pc;
  u32 lds_clocks, bytes, fetched;
};

// What one workgroup took, and for how many of these clocks each unit was busy (matrix and vector: of one SIMD on
// average).
struct GroupTime {
  double clocks, matrix, vector, lds, memory;
};

// `traces` has one list per wave of a workgroup.
GroupTime play(const Program& program, const List<Event>* traces, u32 waves, const TimeModel& model);

}  // namespace emulator
