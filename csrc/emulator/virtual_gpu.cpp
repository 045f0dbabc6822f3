// ROCr's hook for a software GPU, interface 0.4: memory and queues of one device. ROCr loads this library by the path in
// HSA_MODEL_LIB; the Python front has it loaded already, so both see the same device.
#include "virtual_gpu.hpp"

#include <stdarg.h>
#include <time.h>
#include <unistd.h>

namespace emulator {

VirtualGpu gpu = {nullptr, nullptr, nullptr, nullptr, nullptr,
                  PTHREAD_RWLOCK_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, {}, {}, 0, false, 0};

void fault(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  pthread_rwlock_rdlock(&gpu.attached);
  if (gpu.tell)
    gpu.tell(text);
  else
    fprintf(stderr, "virtual GPU: %s\n", text);
  pthread_rwlock_unlock(&gpu.attached);
}

bool allocated(u64 address, u64 bytes) {
  bool found = false;
  pthread_mutex_lock(&gpu.lock);
  for (u32 i = 0; i < gpu.allocations.size && !found; i++) {
    const Allocation& a = gpu.allocations[i];
    found = address >= a.address && address - a.address < a.bytes && bytes <= a.bytes - (address - a.address);
  }
  pthread_mutex_unlock(&gpu.lock);
  return found;
}

u64 now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return u64(t.tv_sec) * 1000000000u + u64(t.tv_nsec);
}

// Sets an event, on which a thread of the runtime may sleep.
void wake(Queue& queue, u32 event) {
  if (!gpu.set_event || !event) return;
  queue.last_event = event;
  gpu.set_event(gpu.set_event_data, event);
}

// The hook sets an event without the lock under which a waiter looks at it and falls asleep, so a waiter can miss it. The
// event stays set, and setting another one makes every waiter look again. The spare event is never destroyed;
// until there is one, and as long as the process does not end, the queue's own last event will do.
static void wake_again(const Queue& queue) {
  pthread_rwlock_rdlock(&gpu.attached);
  u32 spare = __atomic_load_n(&gpu.spare_event, __ATOMIC_ACQUIRE), event = spare || !gpu.run ? spare : queue.last_event;
  if (gpu.set_event && queue.last_event && event) gpu.set_event(gpu.set_event_data, event);
  pthread_rwlock_unlock(&gpu.attached);
}

// A queue that had work a moment ago is polled at once again; an idle one costs a few thousand wake-ups a second. Its
// waiters are woken again after some milliseconds, and whenever twice the time has passed.
void rest(const Queue& queue, u32* polls) {
  if (++*polls < 64)
    sched_yield();
  else
    usleep(*polls < 4096 ? 20 : 200);
  if (*polls >= 64 && !(*polls & (*polls - 1))) wake_again(queue);
}

static void join(Queue& queue) {
  __atomic_store_n(&queue.stop, true, __ATOMIC_RELEASE);
  if (queue.started && !queue.joined) pthread_join(queue.thread, nullptr);
  queue.joined = true;
}

static void stop_all() {
  while (true) {
    Queue* queue = nullptr;
    pthread_mutex_lock(&gpu.lock);
    for (u32 i = 0; i < gpu.queues.size && !queue; i++)
      if (!gpu.queues[i]->joined) queue = gpu.queues[i];
    pthread_mutex_unlock(&gpu.lock);
    if (!queue) return;
    join(*queue);
  }
}

// Whether every packet of every queue has been executed. A queue moves its read pointer after a packet's signal.
static bool all_idle() {
  bool idle = true;
  pthread_mutex_lock(&gpu.lock);
  for (u32 i = 0; i < gpu.queues.size && idle; i++) {
    const QueueInfo& info = gpu.queues[i]->info;
    idle = __atomic_load_n(at<u64>(info.read_pointer), __ATOMIC_ACQUIRE) ==
           __atomic_load_n(at<u64>(info.write_pointer), __ATOMIC_ACQUIRE);
  }
  pthread_mutex_unlock(&gpu.lock);
  return idle;
}

static void* create() { return &gpu; }

static void destroy(void*) { stop_all(); }

static void set_aperture(void*, void* base, u64) { gpu.base = static_cast<u8*>(base); }

static void on_allocated(void*, void* address, u64 bytes, u32 flags) {
  pthread_mutex_lock(&gpu.lock);
  gpu.allocations.push(Allocation{reinterpret_cast<u64>(address), bytes, flags, 0});
  pthread_mutex_unlock(&gpu.lock);
}

static void on_freed(void*, void* address, u64) {
  pthread_mutex_lock(&gpu.lock);
  for (u32 i = 0; i < gpu.allocations.size; i++) {
    if (gpu.allocations[i].address != reinterpret_cast<u64>(address)) continue;
    gpu.allocations[i] = gpu.allocations[--gpu.allocations.size];
    break;
  }
  pthread_mutex_unlock(&gpu.lock);
}

static void no_notification(void*, void (*)(void*), void*) {}
static void no_waiting(void*, void (*)(void*, u64, u64), void*) {}

static void set_event_function(void*, SetEvent function, void* data) {
  gpu.set_event = function;
  gpu.set_event_data = data;
}

static void* register_queue(void*, QueueInfo* info) {
  Queue* queue = allocate<Queue>(1);
  queue->info = *info;
  void* (*work)(void*) = info->type == QUEUE_AQL ? process_aql : process_sdma;
  queue->started = !pthread_create(&queue->thread, nullptr, work, queue);
  if (!queue->started) fault("no thread could be started for a queue");
  pthread_mutex_lock(&gpu.lock);
  gpu.queues.push(queue);
  pthread_mutex_unlock(&gpu.lock);
  return queue;
}

static void destroy_queue(void*, void* given) {
  Queue* queue = static_cast<Queue*>(given);
  join(*queue);
  pthread_mutex_lock(&gpu.lock);
  for (u32 i = 0; i < gpu.queues.size; i++)
    if (gpu.queues[i] == queue) gpu.queues[i] = gpu.queues[--gpu.queues.size];
  pthread_mutex_unlock(&gpu.lock);
  free(queue);
}

// The table that ROCr asks for, in the order of its interface.
struct ModelFunctions {
  u32 major, minor;
  void* (*create)();
  void (*destroy)(void*);
  void (*set_global_aperture)(void*, void*, u64);
  void (*alloced_memory)(void*, void*, u64, u32);
  void (*freed_memory)(void*, void*, u64);
  void (*set_notify_event)(void*, void (*)(void*), void*);
  void (*set_wait_event)(void*, void (*)(void*, u64, u64), void*);
  void* (*register_queue)(void*, QueueInfo*);
  void (*set_set_event)(void*, SetEvent, void*);
  void (*destroy_queue)(void*, void*);
};

}  // namespace emulator

using namespace emulator;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT const ModelFunctions* get_hsakmt_model_functions() {
  static const ModelFunctions functions = {
      0,        4,         create,     destroy,        set_aperture,       on_allocated,
      on_freed, no_notification, no_waiting, register_queue, set_event_function, destroy_queue};
  return &functions;
}

// Who executes dispatches and who hears of faults.
EXPORT void virtual_gpu_attach(RunDispatch run, TellFault tell) {
  pthread_rwlock_wrlock(&gpu.attached);
  gpu.run = run;
  gpu.tell = tell;
  pthread_rwlock_unlock(&gpu.attached);
}

// Called before the process ends: what runs is waited for, and dispatches that follow are skipped. Returns how many were,
// once all queues are empty; a queue that waits for the host is given up after `limit_ms`. The queues stay, since the
// runtime waits for them and destroys them before it unmaps their memory.
EXPORT u32 virtual_gpu_end(u32 limit_ms) {
  pthread_rwlock_wrlock(&gpu.attached);
  gpu.run = nullptr;
  gpu.tell = nullptr;
  gpu.ending = true;
  pthread_rwlock_unlock(&gpu.attached);
  for (u64 limit = now() + 1000000ull * limit_ms; !all_idle() && now() < limit;) usleep(100);
  return __atomic_load_n(&gpu.skipped, __ATOMIC_RELAXED);
}

// An event that nobody waits for and nobody destroys.
EXPORT void virtual_gpu_spare_event(u32 event) { __atomic_store_n(&gpu.spare_event, event, __ATOMIC_RELEASE); }

// The queue that was registered last gets no packets: its thread ends.
EXPORT void virtual_gpu_spare_queue() {
  pthread_mutex_lock(&gpu.lock);
  Queue* queue = gpu.queues.size ? gpu.queues[gpu.queues.size - 1] : nullptr;
  pthread_mutex_unlock(&gpu.lock);
  if (queue) join(*queue);
}

EXPORT u64 virtual_gpu_base() { return reinterpret_cast<u64>(gpu.base); }

// Copies at most `most` allocations; returns how many there are.
EXPORT u32 virtual_gpu_allocations(Allocation* out, u32 most) {
  pthread_mutex_lock(&gpu.lock);
  u32 count = gpu.allocations.size;
  if (count && out) memcpy(out, gpu.allocations.items, sizeof(Allocation) * (count < most ? count : most));
  pthread_mutex_unlock(&gpu.lock);
  return count;
}

EXPORT u32 virtual_gpu_sizes(int what) {
  const u32 sizes[] = {sizeof(Dispatch), sizeof(Allocation)};
  return what >= 0 && what < 2 ? sizes[what] : 0;
}

}  // extern "C"
