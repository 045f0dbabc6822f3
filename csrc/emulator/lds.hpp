// The local data share of one workgroup: its bytes, and per byte the waves that wrote and read it in this interval.
#pragma once
#include "base.hpp"

namespace emulator {

// A direct-to-LDS load is in flight until its vmcnt wait, for every wave. An ordinary access is marked when its wave
// passes a barrier without having waited for it: other waves may then see it late, though the wave itself does not.
enum Flight { DIRECT = 0x80, UNWAITED_WRITE = 0x40, UNWAITED_READ = 0x20, FLIGHT_WAVE = 0x1f };
struct LdsAccess {
  u32 sequence, bytes;
  u64 lanes;
  bool writes, marked;
  u32 address[LANES];
};
constexpr int LDS_ACCESSES = 32;  // two per instruction, of as many as lgkmcnt can count

struct Wave;
struct Inst;

struct Lds {
  u8* bytes;
  u32* written;   // interval << 4 | wave of the last write; 0 = never written
  u32* read;      // interval << 16 | mask of the waves that read
  u32* updated;   // as `read`, for atomics; looked at once the workgroup has used one
  u8* in_flight;  // the incomplete access to the byte: its Flight kind and wave + 1
  u32 size, capacity, interval;
  bool atomics;

  void open(u32 bytes_wanted, bool checks);
  void next_interval();
  void release();
};

// Clocks of one access under two models of the banks; see the README.
struct LdsClocks {
  u32 at_128, at_256;
};

struct BankMemo {  // the last address pattern of an instruction: it rarely changes in a loop
  u64 exec;
  u32 base;
  u32 offset[LANES];
  LdsClocks clocks;
};

// True if [address, address + bytes) may be touched; otherwise a finding is written and the lane must be skipped.
bool lds_in_bounds(Wave& wave, int lane, u32 address, u32 bytes, u32 alignment);
void lds_check_read(Wave& wave, int lane, u32 address, u32 bytes);
void lds_check_write(Wave& wave, int lane, u32 address, u32 bytes);
void lds_check_atomic(Wave& wave, int lane, u32 address, u32 bytes);
// Records an access until its wait; `lds_pass_barrier` marks those still there, `lds_retire` removes them up to a
// sequence number.
void lds_remember(Wave& wave, const u32* address, u64 lanes, u32 bytes, bool writes);
void lds_pass_barrier(Wave& wave);
void lds_retire(Wave& wave, u32 sequence);
void lds_count(Wave& wave, const Inst& in, const u32* address, u64 lanes, u32 bytes, bool reading);

}  // namespace emulator
