// The local data share of one workgroup: its bytes, and per byte who wrote and read it in the current barrier interval.
#pragma once
#include "base.hpp"

namespace emulator {

struct Wave;
struct Inst;

struct Lds {
  u8* bytes;
  u32* written;    // interval << 4 | wave of the last write; 0 = never written
  u32* read;       // interval << 16 | mask of the waves that read
  u8* in_flight;   // wave + 1 of a direct-to-LDS load that has not landed
  u32 size, capacity, interval;

  void open(u32 bytes_wanted, bool checks);
  void next_interval();
  void release();
};

// Clocks of one access under two models of the banks; see the README.
struct LdsClocks { u32 at_128, at_256; };

struct BankMemo {    // the last address pattern of an instruction: it rarely changes in a loop
  u64 exec;
  u32 base;
  u32 offset[LANES];
  LdsClocks clocks;
};

// True if [address, address + bytes) may be touched; otherwise a finding is written and the lane must be skipped.
bool lds_in_bounds(Wave& wave, int lane, u32 address, u32 bytes, u32 alignment);
void lds_check_read(Wave& wave, int lane, u32 address, u32 bytes);
void lds_check_write(Wave& wave, int lane, u32 address, u32 bytes);
void lds_count(Wave& wave, const Inst& in, const u32* address, u64 lanes, u32 bytes, bool reading);

}  // namespace emulator
