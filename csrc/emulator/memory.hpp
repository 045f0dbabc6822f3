// Global memory: host memory seen through declared views. A view is one buffer of the launch, a region the union of
// views that overlap. A byte's tag says which workgroup wrote it last in this launch; a byte with no tag that only
// write-only views hold is uninitialised.
#pragma once
#include "base.hpp"

namespace emulator {

enum Access { READ = 1, WRITE = 2, COMPLETE = 4 };  // COMPLETE: the launch must write every element

constexpr int MAX_DIMENSIONS = 6;
struct View {
  u64 base, span;                                    // bytes from the lowest element to past the highest
  i64 shift;                                         // host address less the kernel's address
  i32 access, dimensions;                            // dimensions == 0: every byte of the span belongs to the view
  i64 size[MAX_DIMENSIONS], stride[MAX_DIMENSIONS];  // in bytes, largest stride first, the last one the element itself
  double fetched;                                    // of memory by a byte read, for the model of time
};

struct Region {
  u64 low, high;
  u32* tags;         // one per byte, zero pages until written; null if no view may be written
  u32 first, count;  // its views
  bool simple;       // one view without holes
};

struct Memory {
  const View* views;
  u32 view_count;
  u32* order;  // views sorted by base
  Region* regions;
  u32 region_count;

  void open(const View* list, u32 count);
  void close();
  Region* region_of(u64 address) const;
  // The view that allows `access` to [address, address + bytes), or -1; `inside` is set if any view holds these bytes
  // at all.
  int view_of(const Region& region, u64 address, u32 bytes, int access, bool* inside) const;
  // Does a view that starts initialised hold this byte?
  bool starts_initialised(const Region& region, u64 address) const;
  // Bytes of the view's elements that have no tag, and the address of the first.
  u64 unwritten(const View& view, u64* first) const;
};

}  // namespace emulator
