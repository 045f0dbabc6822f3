// Happens-before between workgroups, by vector clocks with one component per wave.
//
// A wave's stores belong to the workgroup's current epoch. Epochs end at barriers and at write-backs. A write-back
// (buffer_wbl2 sc1), once its wait has retired it, releases the stores its own wave made before it and those the other
// waves made before the last barrier. A device-scope atomic or store publishes what is released at its address. A
// device-scope atomic that returns, or load, makes what was published there known to its wave; an invalidate
// (buffer_inv sc1) after its wait makes what is known safe to read. A barrier shares both with the workgroup.
#pragma once
#include "base.hpp"

namespace emulator {

// Sorted (component, first epoch not covered).
struct Clock {
  struct Entry {
    u32 component, epoch;
  };
  List<Entry> entries;
  u32 of(u32 component) const;
  void raise(u32 component, u32 epoch);
  void join(const Clock& other);
  void release() { entries.release(); }
};

struct SyncVariables {
  struct Variable {
    u64 address;
    Clock published;
  };
  List<Variable> variables;  // sorted by address
  Clock* find(u64 address, bool create);
  void release();
};

constexpr u32 WAVES_PER_GROUP = 16;
inline u32 component(u32 workgroup, u32 wave) { return workgroup * WAVES_PER_GROUP + wave; }

// A tag packs (component + 1, epoch, written by a device-scope access); the split of the bits depends on the grid.
struct TagLayout {
  u32 bits;  // width of the component
  void open(u64 workgroups) {
    for (bits = 1; (1ull << bits) <= workgroups * WAVES_PER_GROUP; bits++) {
    }
  }
  u32 epochs() const { return 1u << (31 - bits); }
  u32 make(u32 writer, u32 epoch, bool coherent) const {
    return (writer + 1) | (epoch < epochs() ? epoch : epochs() - 1) << bits | u32(coherent) << 31;
  }
  u32 writer(u32 tag) const { return (tag & ((1u << bits) - 1)) - 1; }
  u32 workgroup(u32 tag) const { return writer(tag) / WAVES_PER_GROUP; }
  u32 epoch(u32 tag) const { return (tag & 0x7fffffff) >> bits; }
  static bool coherent(u32 tag) { return tag >> 31; }
};

}  // namespace emulator
