// A GPU for AMD's ROCr runtime: the other side of its hook for a software GPU, and what the Python front sees of it.
#pragma once
#include "base.hpp"

namespace emulator {

// A dispatch packet in plain fields. `grid` counts threads; addresses are the GPU's.
struct Dispatch {
  u64 packet, kernel_object, kernarg;
  u32 grid[3], block[3];
  u32 lds_bytes, scratch_bytes;
};
using RunDispatch = void (*)(const Dispatch*);
using TellFault = void (*)(const char*);

// Memory that ROCr has allocated for this GPU, in whole pages; `flags` are the kernel driver's.
struct Allocation {
  u64 address, bytes;
  u32 flags, unused;
};

// ROCr's description of a queue. The write pointer is polled: this version hands over no doorbell.
struct QueueInfo {
  u64 ring, write_pointer, read_pointer;  // GPU addresses
  u64* doorbell;
  u32 ring_bytes, type;
};
enum QueueType { QUEUE_SDMA = 1, QUEUE_AQL = 2 };

using SetEvent = void (*)(void*, unsigned);

struct Queue {
  QueueInfo info;
  pthread_t thread;
  bool started, joined, stop;
  u32 last_event;  // that the queue has set; 0 for none
};

// The one device of the process. GPU address 0 lies at `base` on the host.
struct VirtualGpu {
  u8* base;
  SetEvent set_event;
  void* set_event_data;
  RunDispatch run;
  TellFault tell;
  pthread_rwlock_t attached;  // read while either is called
  pthread_mutex_t lock;       // of the two lists
  List<Allocation> allocations;
  List<Queue*> queues;
  u32 spare_event;
  bool ending;  // the process ends: dispatches are skipped, and counted
  u32 skipped;
};
extern VirtualGpu gpu;

template <class T>
inline T* at(u64 address) {
  return reinterpret_cast<T*>(gpu.base + address);
}

void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool allocated(u64 address, u64 bytes);  // lies within one allocation
u64 now();                               // nanoseconds, for the time stamps of signals
void wake(Queue& queue, u32 event);
void rest(const Queue& queue, u32* polls);

void* process_aql(void* queue);
void* process_sdma(void* queue);

}  // namespace emulator
