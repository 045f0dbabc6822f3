// Checks every load and store of a kernel. g++ -fsanitize=thread calls a function before each; these are here, in place
// of its library. Each word knows who wrote it last and who read it last, and in which interval, of which a block
// has one more than barriers. Errors are:
//
// - a load of a word that nobody has written, in shared memory by this block
// - two threads at a word between two barriers of which one writes; two blocks of a launch likewise
// - an address of nothing, of another thread's stack, or of a vector that is not aligned
// - before griddep_wait, a word that the kernel before it writes, and a store into one that it reads; in a first kernel
//   any word of global memory
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace host {

constexpr int MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 64 << 10;

inline int current = -1;  // the thread that runs; -1 is none of the block
inline unsigned block = 0;
inline const char* step = "";
inline long problem = 0;
inline char* stacks = nullptr;
inline bool waited[MAX_THREADS];

[[noreturn]] inline void fail(const char* what, long number) {
  std::printf("problem %ld, %s, block %u, thread %d: %s %ld\n", problem, step, block, current, what, number);
  std::fflush(stdout);
  std::_Exit(2);
}

// Intervals are numbered from 1 on through all blocks and launches.
inline uint32_t now = 1, block_began = 1, launch_began = 1;
inline bool first_launch = true;

constexpr int MANY = -2;
struct Word {
  uint32_t written = 0, read = 0;  // when last; 0 is never
  int writer = -1, reader = -1;
};

struct Memory {
  uintptr_t begin, end;
  bool global, writable;
  std::vector<Word> words;

  Memory(const void* at, size_t bytes, bool global, bool writable)
      : begin(reinterpret_cast<uintptr_t>(at)),
        end(begin + bytes),
        global(global),
        writable(writable),
        words((bytes + 3) / 4) {}

  bool met_earlier_block(uint32_t when) const { return global && when >= launch_began && when < block_began; }

  void check_wait(const Word& word, long at, bool write) const {
    if (!global || waited[current]) return;
    if (first_launch) fail("an access before griddep_wait at word", at);
    if (writable && (word.written != 0 || (write && word.read != 0)) && word.written < launch_began)
      fail("before griddep_wait, a word of the kernel before:", at);
  }
  void read(long at) {
    Word& word = words[at];
    check_wait(word, at, false);
    const bool fresh = global ? !writable || word.written != 0 : word.written >= block_began;
    if (!fresh) fail(global ? "nobody has written word" : "nobody has written shared word", at);
    if (word.written == now && word.writer != current) fail("no barrier between a store and this load of word", at);
    if (met_earlier_block(word.written)) fail("another block writes word", at);
    word.reader = word.read == now && word.reader != current ? MANY : current;
    word.read = now;
  }
  void write(long at) {
    if (!writable) fail("a store to an input's word", at);
    Word& word = words[at];
    check_wait(word, at, true);
    if (word.written == now && word.writer != current) fail("two threads store to word", at);
    if (word.read == now && word.reader != current) fail("no barrier between a load and this store of word", at);
    if (met_earlier_block(word.written) || met_earlier_block(word.read)) fail("two blocks use word", at);
    word.writer = current;
    word.written = now;
  }
};
inline std::vector<Memory> memories;  // shared memory first

inline void access(const void* address, size_t bytes, bool write, bool whole) {
  if (current < 0) return;
  const uintptr_t from = reinterpret_cast<uintptr_t>(address);
  const uintptr_t own = reinterpret_cast<uintptr_t>(stacks) + current * STACK_BYTES;
  if (from - own < STACK_BYTES) return;
  if (whole && from % bytes != 0) fail("an address that is no multiple of", static_cast<long>(bytes));
  for (Memory& memory : memories) {
    if (from < memory.begin || from + bytes > memory.end) continue;
    for (uintptr_t at = (from - memory.begin) / 4; at <= (from + bytes - 1 - memory.begin) / 4; ++at)
      write ? memory.write(static_cast<long>(at)) : memory.read(static_cast<long>(at));
    return;
  }
  const long distance = static_cast<long>(from) - static_cast<long>(memories.back().begin);
  fail("an address of nothing; in words from the plan's begin:", distance / 4);
}

}  // namespace host

extern "C" {

void host_griddep_wait() { host::waited[host::current] = true; }
void host_prefetch(const void* address) { host::access(address, 4, false, true); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* address, size_t bytes) { host::access(address, bytes, false, false); }
void __tsan_write_range(void* address, size_t bytes) { host::access(address, bytes, true, false); }
#define MLA_ACCESSES(bytes)                                                                      \
  void __tsan_read##bytes(void* address) { host::access(address, bytes, false, true); }          \
  void __tsan_write##bytes(void* address) { host::access(address, bytes, true, true); }          \
  void __tsan_unaligned_read##bytes(void* address) { host::access(address, bytes, false, false); } \
  void __tsan_unaligned_write##bytes(void* address) { host::access(address, bytes, true, false); }
MLA_ACCESSES(1)
MLA_ACCESSES(2)
MLA_ACCESSES(4)
MLA_ACCESSES(8)
MLA_ACCESSES(16)
#undef MLA_ACCESSES

}  // extern "C"
