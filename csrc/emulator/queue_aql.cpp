// Queues of packets in AMD's architected queuing language: dispatches, barriers, and the vendor's own packets.
#include "virtual_gpu.hpp"

namespace emulator {

enum PacketType { VENDOR = 0, INVALID = 1, KERNEL_DISPATCH = 2, BARRIER_AND = 3, BARRIER_OR = 5 };
enum VendorFormat { PM4_BUFFER = 1, BARRIER_VALUE = 2 };
constexpr u32 PACKET_BYTES = 64;

// amd_signal_t, as far as a GPU touches it.
struct Signal {
  i64 kind, value;
  u64 mailbox;
  u32 event_id, reserved;
  u64 start, end;
};

template <class T>
static T field(const u8* packet, u32 offset) {
  T value;
  memcpy(&value, packet + offset, sizeof(T));
  return value;
}

static bool stopping(const Queue& queue) { return __atomic_load_n(&queue.stop, __ATOMIC_ACQUIRE); }

static void complete(Queue& queue, u64 address, u64 start) {
  if (!address) return;
  Signal* signal = at<Signal>(address);
  signal->start = start;
  signal->end = now();
  // The host may reuse the signal's memory once it sees the new value, so the rest is read before.
  u32 event = signal->event_id;
  u64 mailbox = signal->mailbox;
  __atomic_sub_fetch(&signal->value, 1, __ATOMIC_SEQ_CST);
  if (!event) return;
  if (mailbox) __atomic_store_n(at<u64>(mailbox), u64(event), __ATOMIC_SEQ_CST);
  wake(queue, event);
}

static i64 value_of(u64 signal) { return __atomic_load_n(&at<Signal>(signal)->value, __ATOMIC_ACQUIRE); }

// Waits until all, or any, of the five signals that a barrier packet may name are zero.
static void wait_barrier(const Queue& queue, const u8* packet, bool any) {
  for (u32 polls = 0; !stopping(queue); rest(queue, &polls)) {
    u32 named = 0, zero = 0;
    for (u32 i = 0; i < 5; i++) {
      u64 signal = field<u64>(packet, 8 + 8 * i);
      if (!signal) continue;
      named++;
      zero += value_of(signal) == 0;
    }
    if (any ? zero || !named : zero == named) return;
  }
}

// Waits until a signal's masked value compares as asked: =, !=, <, >=.
static void wait_value(const Queue& queue, const u8* packet) {
  u64 signal = field<u64>(packet, 8);
  i64 wanted = field<i64>(packet, 16), mask = field<i64>(packet, 24);
  u32 condition = field<u32>(packet, 32);
  for (u32 polls = 0; signal && !stopping(queue); rest(queue, &polls)) {
    i64 value = value_of(signal) & mask;
    if (condition == 0 ? value == wanted : condition == 1 ? value != wanted : condition == 2 ? value < wanted : value >= wanted)
      return;
  }
}

// Commands of the GPU's own front end. ROCr sends cache maintenance, which has nothing to do here.
static void run_pm4(const u8* packet) {
  constexpr u32 NOP = 0x10, ACQUIRE_MEM = 0x58, INDIRECT_BUFFER = 0x3f;
  u32 jump = field<u32>(packet, 4), dwords = field<u32>(packet, 16) & 0xfffff;
  u64 buffer = (u64(field<u32>(packet, 12)) << 32 | field<u32>(packet, 8)) & ~3ull;
  if ((jump >> 8 & 0xff) != INDIRECT_BUFFER || !allocated(buffer, 4ull * dwords))
    return fault("a queue holds a PM4 packet that is no jump to a buffer in GPU memory");
  for (u32 i = 0; i < dwords;) {
    u32 header = at<u32>(buffer)[i], code = header >> 8 & 0xff;
    if (header >> 30 != 3 || (code != NOP && code != ACQUIRE_MEM))
      return fault("PM4 command 0x%02x is not modelled; cache maintenance is", code);
    i += (header >> 16 & 0x3fff) + 2;
  }
}

static void run_dispatch(const u8* packet, u64 address) {
  Dispatch d = {};
  d.packet = address;
  for (u32 axis = 0; axis < 3; axis++) {
    d.block[axis] = field<u16>(packet, 4 + 2 * axis);
    d.grid[axis] = field<u32>(packet, 12 + 4 * axis);
  }
  d.scratch_bytes = field<u32>(packet, 24);
  d.lds_bytes = field<u32>(packet, 28);
  d.kernel_object = field<u64>(packet, 32);
  d.kernarg = field<u64>(packet, 40);
  pthread_rwlock_rdlock(&gpu.attached);
  RunDispatch run = gpu.run;
  if (run) run(&d);
  bool ending = gpu.ending;
  pthread_rwlock_unlock(&gpu.attached);
  if (run) return;
  if (ending)
    __atomic_add_fetch(&gpu.skipped, 1, __ATOMIC_RELAXED);
  else
    fault("a dispatch found nobody who executes kernels; start the GPU from mla_suite.emulator");
}

// Executes one packet; a fault is reported and the packet completes, so that nobody waits for it forever.
static void run_packet(Queue& queue, const u8* packet, u64 address) {
  u64 start = now();
  u32 type = field<u16>(packet, 0) & 0xff;
  if (type == KERNEL_DISPATCH) {
    run_dispatch(packet, address);
  } else if (type == BARRIER_AND || type == BARRIER_OR) {
    wait_barrier(queue, packet, type == BARRIER_OR);
  } else if (type == VENDOR && field<u8>(packet, 2) == BARRIER_VALUE) {
    wait_value(queue, packet);
  } else if (type == VENDOR && field<u8>(packet, 2) == PM4_BUFFER) {
    run_pm4(packet);
  } else {
    fault("a queue holds a packet of type %u, format %u, which is not modelled", type, field<u8>(packet, 2));
  }
  if (!stopping(queue) || type == KERNEL_DISPATCH) complete(queue, field<u64>(packet, 56), start);
}

void* process_aql(void* given) {
  Queue& queue = *static_cast<Queue*>(given);
  u64* write = at<u64>(queue.info.write_pointer);
  u64* read = at<u64>(queue.info.read_pointer);
  u32 slots = queue.info.ring_bytes / PACKET_BYTES;
  u64 index = __atomic_load_n(read, __ATOMIC_ACQUIRE);
  for (u32 polls = 0; !stopping(queue); rest(queue, &polls)) {
    while (!stopping(queue) && index < __atomic_load_n(write, __ATOMIC_ACQUIRE)) {
      u64 address = queue.info.ring + index % slots * PACKET_BYTES;
      u16* header = at<u16>(address);
      // A packet is the GPU's once its header is written, which comes last.
      while ((__atomic_load_n(header, __ATOMIC_ACQUIRE) & 0xff) == INVALID && !stopping(queue)) rest(queue, &polls);
      if (stopping(queue)) break;
      u8 packet[PACKET_BYTES];
      memcpy(packet, at<u8>(address), sizeof(packet));
      run_packet(queue, packet, address);
      __atomic_store_n(header, u16(INVALID), __ATOMIC_RELEASE);
      __atomic_store_n(read, ++index, __ATOMIC_RELEASE);
      polls = 0;
    }
  }
  return nullptr;
}

}  // namespace emulator
