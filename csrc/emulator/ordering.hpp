// Happens-before between workgroups, by vector clocks.
//
// A workgroup's stores belong to its current epoch. A write-back (buffer_wbl2 sc1) closes the epoch when it is issued;
// once its wait has retired it, a device-scope atomic publishes the closed epochs at its address. A device-scope atomic
// that returns makes what was published there known to its wave; an invalidate (buffer_inv sc1) after its wait makes
// what is known safe to read for the workgroup.
#pragma once
#include "base.hpp"

namespace emulator {

// Sorted (workgroup, first epoch not covered).
struct Clock {
  struct Entry {
    u32 workgroup, epoch;
  };
  List<Entry> entries;
  u32 of(u32 workgroup) const;
  void raise(u32 workgroup, u32 epoch);
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

// A tag packs (workgroup + 1, epoch, written by a device-scope access); the split of the bits depends on the grid.
struct TagLayout {
  u32 workgroup_bits;
  void open(u64 workgroups) {
    for (workgroup_bits = 1; (1ull << workgroup_bits) <= workgroups; workgroup_bits++) {
    }
  }
  u32 epochs() const { return 1u << (31 - workgroup_bits); }
  u32 make(u32 workgroup, u32 epoch, bool coherent) const {
    return (workgroup + 1) | (epoch < epochs() ? epoch : epochs() - 1) << workgroup_bits | u32(coherent) << 31;
  }
  u32 workgroup(u32 tag) const { return (tag & ((1u << workgroup_bits) - 1)) - 1; }
  u32 epoch(u32 tag) const { return (tag & 0x7fffffff) >> workgroup_bits; }
  static bool coherent(u32 tag) { return tag >> 31; }
};

}  // namespace emulator
