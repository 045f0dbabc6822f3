#include "wave.hpp"

namespace emulator {

void Lds::open(u32 wanted, bool checks) {
  if (wanted > capacity || !bytes) {
    release();
    capacity = wanted + 64;
    bytes = allocate<u8>(capacity);
    written = allocate<u32>(capacity);
    read = allocate<u32>(capacity);
    updated = allocate<u32>(capacity);
    in_flight = allocate<u8>(capacity);
  }
  size = wanted;
  interval = 1;
  atomics = false;
  memset(bytes, 0xff, wanted);  // not a number in every float format
  if (checks) {
    memset(written, 0, 4ull * wanted);
    memset(read, 0, 4ull * wanted);
    memset(updated, 0, 4ull * wanted);
    memset(in_flight, 0, wanted);
  }
}

void Lds::next_interval() {
  if (++interval < 0xffff) return;
  for (u32 i = 0; i < size; i++) {  // the tags have 16 bits for the interval: start over, keeping only "was written"
    written[i] = written[i] ? 15 : 0;
    read[i] = updated[i] = 0;
  }
  interval = 1;
}

void Lds::release() {
  free(bytes);
  free(written);
  free(read);
  free(updated);
  free(in_flight);
  bytes = nullptr;
}

// The wave whose incomplete access conflicts with an access of `wave`, or -1.
static int conflict_in_flight(const Wave& wave, const u8* in_flight, u32 bytes, bool writing) {
  for (u32 i = 0; i < bytes; i++) {
    int owner = int(in_flight[i] & FLIGHT_WAVE) - 1;
    if (in_flight[i] & DIRECT) return owner;
    if (owner >= 0 && owner != wave.id && (writing || (in_flight[i] & UNWAITED_WRITE))) return owner;
  }
  return -1;
}

void lds_remember(Wave& wave, const u32* address, u64 lanes, u32 bytes, bool writes) {
  if (!wave.worker->launch->checks) return;
  if (wave.lds_count == LDS_ACCESSES) {  // scalar loads in between keep the counter from saying what is complete
    wave.lds_first = (wave.lds_first + 1) % LDS_ACCESSES;
    wave.lds_count--;
  }
  LdsAccess& access = wave.lds_accesses[(wave.lds_first + wave.lds_count++) % LDS_ACCESSES];
  access.sequence = wave.issued[LGKM] + 1;
  access.bytes = bytes;
  access.lanes = lanes;
  access.writes = writes;
  access.marked = false;
  memcpy(access.address, address, sizeof(access.address));
}

static void mark(Wave& wave, LdsAccess& access, u8 value) {
  Lds& lds = wave.worker->lds;
  for_lanes(access.lanes, [&](int l) {
    u32 at = access.address[l];
    if (at <= lds.size && access.bytes <= lds.size - at) memset(lds.in_flight + at, value, access.bytes);
  });
}

void lds_pass_barrier(Wave& wave) {
  for (u32 i = 0; i < wave.lds_count; i++) {
    LdsAccess& access = wave.lds_accesses[(wave.lds_first + i) % LDS_ACCESSES];
    if (access.marked) continue;
    access.marked = true;
    mark(wave, access, u8((access.writes ? UNWAITED_WRITE : UNWAITED_READ) | (wave.id + 1)));
  }
}

void lds_retire(Wave& wave, u32 sequence) {
  while (wave.lds_count) {
    LdsAccess& access = wave.lds_accesses[wave.lds_first];
    if (i32(access.sequence - sequence) > 0) break;
    if (access.marked) mark(wave, access, 0);
    wave.lds_first = (wave.lds_first + 1) % LDS_ACCESSES;
    wave.lds_count--;
  }
}

bool lds_in_bounds(Wave& wave, int lane, u32 address, u32 bytes, u32 alignment) {
  Lds& lds = wave.worker->lds;
  if (address > lds.size || bytes > lds.size - address) {
    report(wave, found_lds_out_of_bounds, 1ull << lane, address, bytes);
    return false;
  }
  if (address & (alignment - 1)) report(wave, found_lds_misaligned, 1ull << lane, address, alignment);
  return true;
}

// The other waves in the tags of any of these bytes in this interval.
static u32 others_in(const Wave& wave, const u32* tags, u32 bytes) {
  u32 stamp = wave.worker->lds.interval << 16, others = 0;
  for (u32 i = 0; i < bytes; i++) others |= (tags[i] ^ stamp) < 0x10000u ? tags[i] : 0;
  return others & 0xffffu & ~(1u << wave.id);
}

// Atomics of different waves do not race with each other, only with plain accesses.
void lds_check_atomic(Wave& wave, int lane, u32 address, u32 bytes) {
  Lds& lds = wave.worker->lds;
  u32 mine = lds.interval << 4 | u32(wave.id), stamp = lds.interval << 16, race = 0, fresh = 0, flying = 0;
  u32 *written = lds.written + address, *updated = lds.updated + address;
  lds.atomics = true;
  for (u32 i = 0; i < bytes; i++) {
    race |= ((written[i] ^ mine) - 1) < 15u;
    fresh |= written[i] == 0;
    flying |= lds.in_flight[address + i];
    updated[i] = ((updated[i] ^ stamp) < 0x10000u ? updated[i] : stamp) | 1u << wave.id;
  }
  u32 readers = others_in(wave, lds.read + address, bytes);
  int owner = flying ? conflict_in_flight(wave, lds.in_flight + address, bytes, true) : -1;
  if (owner >= 0)
    report(wave, found_lds_in_flight, 1ull << lane, address, owner);
  else if (race)
    report(wave, found_lds_race, 1ull << lane, address, written[0] & 15);
  else if (readers)
    report(wave, found_lds_race, 1ull << lane, address, first_lane(readers));
  else if (fresh)
    report(wave, found_lds_uninitialised, 1ull << lane, address, bytes);
}

void lds_check_read(Wave& wave, int lane, u32 address, u32 bytes) {
  Lds& lds = wave.worker->lds;
  u32 mine = lds.interval << 4 | u32(wave.id), stamp = lds.interval << 16, reader = stamp | 1u << wave.id;
  u32 race = 0, fresh = 0, flying = 0;
  u32 *written = lds.written + address, *read = lds.read + address;
  u8* in_flight = lds.in_flight + address;
  for (u32 i = 0; i < bytes; i++) {
    race |= ((written[i] ^ mine) - 1) < 15u;
    fresh |= written[i] == 0;
    flying |= in_flight[i];
    read[i] = ((read[i] ^ stamp) < 0x10000u ? read[i] : 0) | reader;
  }
  u32 updaters = lds.atomics ? others_in(wave, lds.updated + address, bytes) : 0;
  if (!(race | fresh | flying | updaters)) return;
  u64 bit = 1ull << lane;
  int owner = flying ? conflict_in_flight(wave, in_flight, bytes, false) : -1;
  if (owner >= 0)
    report(wave, found_lds_in_flight, bit, address, owner);
  else if (race)
    report(wave, found_lds_race, bit, address, written[0] & 15);
  else if (updaters)
    report(wave, found_lds_race, bit, address, first_lane(updaters));
  else if (fresh)
    report(wave, found_lds_uninitialised, bit, address, bytes);
}

void lds_check_write(Wave& wave, int lane, u32 address, u32 bytes) {
  Lds& lds = wave.worker->lds;
  u32 mine = lds.interval << 4 | u32(wave.id), stamp = lds.interval << 16, others = 0xffffu & ~(1u << wave.id);
  u32 race = 0, readers = lds.atomics ? others_in(wave, lds.updated + address, bytes) : 0, flying = 0;
  u32 *written = lds.written + address, *read = lds.read + address;
  u8* in_flight = lds.in_flight + address;
  for (u32 i = 0; i < bytes; i++) {
    race |= ((written[i] ^ mine) - 1) < 15u;
    readers |= ((read[i] ^ stamp) < 0x10000u) ? read[i] & others : 0;
    flying |= in_flight[i];
  }
  int owner = flying ? conflict_in_flight(wave, in_flight, bytes, true) : -1;
  if (owner >= 0)
    report(wave, found_lds_in_flight, 1ull << lane, address, owner);
  else if (race)
    report(wave, found_lds_race, 1ull << lane, address, written[0] & 15);
  else if (readers)
    report(wave, found_lds_race, 1ull << lane, address, first_lane(readers));
  for (u32 i = 0; i < bytes; i++) written[i] = mine;
}

// Lanes are served in groups that together move `row` bytes; a group takes as many clocks as the busiest bank has
// distinct words.
static u32 bank_clocks(const u32* address, u64 lanes, u32 bytes, u32 row) {
  u32 banks = row / 4, words = bytes < 4 ? 1 : bytes / 4, group = row / (words * 4), clocks = 0;
  if (group > 32 && row == 128) group = 32;
  for (u32 first = 0; first < u32(LANES); first += group) {
    u32 seen[64][8], depth[64] = {}, worst = 0;
    for (u32 lane = first; lane < first + group && lane < u32(LANES); lane++) {
      if (!(lanes >> lane & 1)) continue;
      for (u32 w = 0; w < words; w++) {
        u32 word = (address[lane] >> 2) + w, bank = word % banks, known = depth[bank] < 8 ? depth[bank] : 8;
        bool found = false;
        for (u32 k = 0; k < known; k++) found |= seen[bank][k] == word;
        if (found) continue;
        if (known < 8) seen[bank][known] = word;
        if (++depth[bank] > worst) worst = depth[bank];
      }
    }
    clocks += worst;
  }
  return clocks;
}

void lds_count(Wave& wave, const Inst& in, const u32* address, u64 lanes, u32 bytes, bool reading) {
  Worker& worker = *wave.worker;
  PcCounts& count = worker.counts[in.pc];
  BankMemo& memo = worker.banks[in.pc];
  count.lds_bytes += u64(__builtin_popcountll(lanes)) * bytes;
  u32 base = address[first_lane(lanes)], same = 1;
  for (int lane = 0; lane < LANES; lane++) same &= !(lanes >> lane & 1) | (memo.offset[lane] == address[lane] - base);
  if (!same || memo.exec != lanes || (memo.base ^ base) & 255) {
    memo.exec = lanes;
    memo.base = base;
    for (int lane = 0; lane < LANES; lane++) memo.offset[lane] = address[lane] - base;
    memo.clocks.at_128 = bank_clocks(address, lanes, bytes, 128);
    memo.clocks.at_256 = reading && wave.worker->launch->program->arch == GFX950
                             ? bank_clocks(address, lanes, bytes, 256)
                             : memo.clocks.at_128;
  }
  count.lds_clocks_128 += memo.clocks.at_128;
  count.lds_clocks_256 += memo.clocks.at_256;
}

}  // namespace emulator
