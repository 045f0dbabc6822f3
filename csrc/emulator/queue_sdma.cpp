// Queues of the copy engine (SDMA, as gfx9 and its successors encode it): what hipMemcpy between host and GPU becomes.
#include "virtual_gpu.hpp"

namespace emulator {

enum Operation { NOP = 0, COPY = 1, FENCE = 5, TRAP = 6, POLL = 8, ATOMIC = 10, FILL = 11, TIMESTAMP = 13 };

// Dwords of the ring from a byte offset on.
struct Reader {
  const Queue& queue;
  u64 offset;
  u32 operator[](u32 i) const {
    u64 where = (offset + 4ull * i) % queue.info.ring_bytes;
    return *at<u32>(queue.info.ring + where);
  }
  u64 wide(u32 i) const { return u64((*this)[i + 1]) << 32 | (*this)[i]; }
};

static bool stopping(const Queue& queue) { return __atomic_load_n(&queue.stop, __ATOMIC_ACQUIRE); }

static bool reachable(u64 address, u64 bytes, const char* what) {
  if (allocated(address, bytes)) return true;
  fault("the copy engine's %s of %llu bytes at 0x%llx lies in no allocation", what,
        static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address));
  return false;
}

static void poll(const Queue& queue, const Reader& in) {
  u32 how = in[0] >> 28 & 7, wanted = in[3], mask = in[4];
  if (!(in[0] >> 31) || !how) return;  // a register, such as the one that flushes the host's writes: nothing to wait for
  if (!reachable(in.wide(1), 4, "poll")) return;
  for (u32 polls = 0; !stopping(queue); rest(queue, &polls)) {
    u32 value = __atomic_load_n(at<u32>(in.wide(1)), __ATOMIC_ACQUIRE) & mask;
    const bool met[] = {true,           value < wanted,  value <= wanted, value == wanted,
                        value != wanted, value >= wanted, value > wanted,  true};
    if (met[how]) return;
  }
}

// Executes one command; returns its dwords, 0 for one that is not modelled.
static u32 run_command(Queue& queue, const Reader& in) {
  constexpr u32 LINEAR = 0, GLOBAL_TIME = 2, ADD_64 = 47;
  u32 operation = in[0] & 0xff, sub = in[0] >> 8 & 0xff;
  if (operation == NOP) return 1 + (in[0] >> 16 & 0x3fff);
  if (operation == COPY && sub == LINEAR) {
    u64 bytes = u64(in[1] & 0x3fffffff) + 1, from = in.wide(3), to = in.wide(5);
    if (reachable(from, bytes, "read") && reachable(to, bytes, "write")) memmove(at<u8>(to), at<u8>(from), bytes);
    return 7;
  }
  if (operation == FENCE) {
    if (reachable(in.wide(1), 4, "fence")) __atomic_store_n(at<u32>(in.wide(1)), in[3], __ATOMIC_RELEASE);
    return 4;
  }
  if (operation == TRAP) {
    wake(queue, in[1] & 0xfffffff);
    return 2;
  }
  if (operation == POLL) {
    poll(queue, in);
    return 6;
  }
  if (operation == ATOMIC && in[0] >> 25 == ADD_64) {
    if (reachable(in.wide(1), 8, "atomic")) __atomic_add_fetch(at<u64>(in.wide(1)), in.wide(3), __ATOMIC_SEQ_CST);
    return 8;
  }
  if (operation == FILL) {
    u64 bytes = u64(in[4] & 0x3fffffff) + 1;  // whole words: the size says how far the last one reaches
    if (reachable(in.wide(1), bytes, "fill"))
      for (u64 i = 0; i < bytes; i++) at<u8>(in.wide(1))[i] = u8(in[3] >> 8 * (i & 3));
    return 5;
  }
  if (operation == TIMESTAMP && sub == GLOBAL_TIME) {
    if (reachable(in.wide(1), 8, "time stamp")) *at<u64>(in.wide(1)) = now();
    return 3;
  }
  fault("the copy engine's command %u.%u is not modelled", operation, sub);
  return 0;
}

void* process_sdma(void* given) {
  Queue& queue = *static_cast<Queue*>(given);
  u64* write = at<u64>(queue.info.write_pointer);
  u64* read = at<u64>(queue.info.read_pointer);
  u64 offset = __atomic_load_n(read, __ATOMIC_ACQUIRE);
  for (u32 polls = 0; !stopping(queue); rest(queue, &polls)) {
    while (!stopping(queue) && offset < __atomic_load_n(write, __ATOMIC_ACQUIRE)) {
      u32 dwords = run_command(queue, Reader{queue, offset});
      if (!dwords) offset = __atomic_load_n(write, __ATOMIC_ACQUIRE);  // what follows cannot be read any more
      offset += 4ull * dwords;
      __atomic_store_n(read, offset, __ATOMIC_RELEASE);
      polls = 0;
    }
  }
  return nullptr;
}

}  // namespace emulator
