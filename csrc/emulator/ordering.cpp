#include "ordering.hpp"

namespace emulator {

static u32 place(const List<Clock::Entry>& entries, u32 component) {
  u32 low = 0, high = entries.size;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (entries[middle].component < component)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

u32 Clock::of(u32 component) const {
  u32 at = place(entries, component);
  return at < entries.size && entries[at].component == component ? entries[at].epoch : 0;
}

void Clock::raise(u32 component, u32 epoch) {
  if (!epoch) return;
  u32 at = place(entries, component);
  if (at < entries.size && entries[at].component == component) {
    if (entries[at].epoch < epoch) entries[at].epoch = epoch;
  } else {
    entries.insert(at, Entry{component, epoch});
  }
}

void Clock::join(const Clock& other) {
  for (u32 i = 0; i < other.entries.size; i++) raise(other.entries[i].component, other.entries[i].epoch);
}

Clock* SyncVariables::find(u64 address, bool create) {
  u32 low = 0, high = variables.size;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (variables[middle].address < address)
      low = middle + 1;
    else
      high = middle;
  }
  if (low < variables.size && variables[low].address == address) return &variables[low].published;
  if (!create) return nullptr;
  variables.insert(low, Variable{address, Clock{}});
  return &variables[low].published;
}

void SyncVariables::release() {
  for (u32 i = 0; i < variables.size; i++) variables[i].published.release();
  variables.release();
}

}  // namespace emulator
