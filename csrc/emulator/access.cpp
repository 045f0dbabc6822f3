// The rules of a global access: bounds, rights, alignment, initialisation, and order between workgroups.
#include "global.hpp"

namespace emulator {

Ordering ordering_of(const Inst& in) { return in.mod[mod_sc1] ? COHERENT : PLAIN; }

static bool ordered(Wave& wave, u32 tag, Ordering ordering) {
  const TagLayout& tags = wave.worker->launch->tags;
  Workgroup& group = *wave.group;
  if (tags.workgroup(tag) == group.index) return true;
  if (ordering != PLAIN && TagLayout::coherent(tag)) return true;
  u32 writer = tags.writer(tag), epoch = tags.epoch(tag);
  if (ordering == PLAIN) return group.safe.of(writer) > epoch || wave.safe.of(writer) > epoch;
  return group.known.of(writer) > epoch || wave.known.of(writer) > epoch;
}

static void check_tags(Wave& wave, const Region& region, int lane, u64 address, u32 bytes, int access,
                       Ordering ordering) {
  Launch& launch = *wave.worker->launch;
  u32* tags = region.tags + (address - region.low);
  u32 before = 0;
  bool fresh = false;
  for (u32 i = 0; i < bytes; i++) {
    u32 tag = __atomic_load_n(tags + i, __ATOMIC_RELAXED);
    if (tag == before && i) continue;
    before = tag;
    if (!tag) {
      if ((access & READ) && !fresh && !launch.memory.starts_initialised(region, address + i)) {
        fresh = true;
        report(wave, found_global_uninitialised, 1ull << lane, address + i, bytes);
      }
    } else if (!ordered(wave, tag, ordering)) {
      report(wave, found_global_unordered, 1ull << lane, address + i, launch.tags.workgroup(tag));
      break;
    }
  }
  if (!(access & WRITE)) return;
  u32 tag = launch.tags.make(component(wave.group->index, u32(wave.id)), wave.group->epoch, ordering != PLAIN);
  wave.group->stored = true;
  for (u32 i = 0; i < bytes; i++) __atomic_store_n(tags + i, tag, __ATOMIC_RELAXED);
}

u8* global_access(Wave& wave, const Inst&, int lane, u64 address, u32 bytes, u32 alignment, int access,
                  Ordering ordering) {
  Worker& worker = *wave.worker;
  Launch& launch = *worker.launch;
  Region* region = worker.region;
  if (!region || address < region->low || address >= region->high) region = launch.memory.region_of(address);
  if (!region || bytes > region->high - address) {
    report(wave, found_global_out_of_bounds, 1ull << lane, address, bytes);
    return nullptr;
  }
  worker.region = region;
  u32 view;
  if (region->simple && !((access & WRITE) && !region->tags)) {
    view = launch.memory.order[region->first];
  } else {
    bool inside;
    int found = launch.memory.view_of(*region, address, bytes, access, &inside);
    if (found < 0) {
      report(wave, inside ? found_global_read_only : found_global_out_of_bounds, 1ull << lane, address, bytes);
      return nullptr;
    }
    view = u32(found);
  }
  if (access & READ) worker.loaded[view] += bytes;
  if (access & WRITE) worker.stored[view] += bytes;
  if (launch.checks) {
    if (address & (alignment - 1)) report(wave, found_global_misaligned, 1ull << lane, address, alignment);
    if (region->tags) check_tags(wave, *region, lane, address, bytes, access, ordering);
  }
  return reinterpret_cast<u8*>(address + u64(launch.memory.views[view].shift));
}

void publish(Wave& wave, u64 address) {
  Workgroup& group = *wave.group;
  bool released = group.known.entries.size || wave.known.entries.size;
  for (int w = 0; w < group.waves; w++) released |= group.released[w] != 0;
  if (!released) return;
  Clock* clock = wave.worker->launch->sync.find(address, true);
  clock->join(group.known);
  clock->join(wave.known);
  for (int w = 0; w < group.waves; w++) clock->raise(component(group.index, u32(w)), group.released[w]);
}

void learn(Wave& wave, u64 address, Clock& into) {
  Clock* clock = wave.worker->launch->sync.find(address, false);
  if (clock) into.join(*clock);
}

void watch_spin(Wave& wave, const Inst& in, u64 address, u32 value) {
  if (wave.spin.pc != in.pc || wave.spin.address != address || wave.spin.value != value) {
    wave.spin.pc = in.pc;
    wave.spin.address = address;
    wave.spin.value = value;
    wave.spin.times = 0;
    return;
  }
  if (++wave.spin.times % 64) return;
  wave.yielded = true;
  Launch& launch = *wave.worker->launch;
  if (wave.spin.times < launch.spin_limit) return;
  for (int t = 0; t < launch.threads; t++) {  // an earlier workgroup may still write the value waited for
    u32 position = __atomic_load_n(&launch.workers[t].running, __ATOMIC_RELAXED);
    if (position < wave.group->position) {
      sched_yield();
      return;
    }
  }
  report(wave, found_spin, wave.exec, address, i64(value));
  wave.worker->abandon = true;
}

void require_address(Wave& wave, const Inst&, const Operand& op) {
  if (op.kind != VECTOR || !wave.worker->launch->checks) return;
  for (int i = 0; i < op.count; i++)
    if (!wave.defined[op.index + i]) report(wave, found_uninitialised_address, wave.exec, 0, op.index + i);
}

static int distinct(const u64* address, u64 lanes) {
  constexpr u32 SLOTS = 2 * LANES;
  u64 seen[SLOTS];
  bool used[SLOTS] = {};
  int count = 0;
  for_lanes(lanes, [&](int l) {
    u32 slot = u32(address[l] * 0x9e3779b97f4a7c15ull >> 57);
    while (used[slot] && seen[slot] != address[l]) slot = (slot + 1) % SLOTS;
    count += !used[slot];
    used[slot] = true;
    seen[slot] = address[l];
  });
  return count;
}

void count_load(Wave& wave, const Inst& in, const u64* address, u64 lanes, u32 bytes) {
  count_global(wave, in, lanes, bytes);
  Worker& worker = *wave.worker;
  if (!worker.traces || !lanes) return;
  const Memory& memory = worker.launch->memory;
  const Region* region = memory.region_of(address[first_lane(lanes)]);
  double fetched = region ? memory.views[memory.order[region->first]].fetched : 1;
  worker.fetched = u64(distinct(address, lanes) * bytes * fetched);
}

void count_global(Wave& wave, const Inst& in, u64 lanes, u32 bytes) {
  wave.worker->counts[in.pc].global_bytes += u64(__builtin_popcountll(lanes)) * bytes;
}

}  // namespace emulator
