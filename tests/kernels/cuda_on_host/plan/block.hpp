// Runs the threads of a block as fibers of one CPU thread, in an order that a seed varies: in each round most warps go
// on to their next exchange or barrier. Errors are a lane missing from an exchange, and threads at two barriers.
#pragma once

#include <csetjmp>
#include <random>

#include <ucontext.h>

#include "accesses.hpp"

namespace host {

enum class At { nothing, shuffle, ballot, largest, sum, barrier, end };

struct Fiber {
  jmp_buf context;
  ucontext_t begin;
  bool begun = false;
  At at = At::end;
  const void* site = nullptr;  // of the call that waits
  int value = 0;
};

class Block {
 public:
  explicit Block(uint32_t seed) : random_(seed), fibers_(MAX_THREADS) {
    stacks = static_cast<char*>(std::aligned_alloc(4096, MAX_THREADS * STACK_BYTES));
    running_ = this;
  }

  template <class Kernel>
  void run(int threads, Kernel kernel) {
    kernel_ = kernel;
    block_began = ++now;
    for (int thread = 0; thread < threads; ++thread) {
      fibers_[thread].at = At::nothing;
      waited[thread] = false;
    }
    const int warps = threads / 32;
    while (true) {
      const uint32_t asleep = random_() & random_(), first = random_();
      for (int i = 0; i < warps; ++i) {
        const int warp = static_cast<int>((first + i) % warps);
        if ((asleep >> warp & 1) == 0) advance(warp);
      }
      if (asleep == 0 || !any(threads, At::nothing)) {
        for (int warp = 0; warp < warps; ++warp) advance(warp);
        if (!any(threads, At::nothing) && !pass_barrier(threads)) return;
      }
    }
  }

  // Called by fibers.
  static const int* meet(At at, unsigned mask, int value, const void* site) {
    if (mask != ~0u) fail("a mask that leaves out lanes:", mask);
    wait(at, value, site);
    return running_->given_[current / 32];
  }
  static void wait(At at, int value, const void* site) {
    Fiber& fiber = running_->fibers_[current];
    fiber.at = at;
    fiber.value = value;
    fiber.site = site;
    leave(fiber);
  }

 private:
  static void leave(Fiber& fiber) {
    if (_setjmp(fiber.context) == 0) _longjmp(running_->scheduler_, 1);
  }
  static void enter() {
    while (true) {
      running_->kernel_();
      wait(At::end, 0, nullptr);
    }
  }
  void resume(int thread) {
    Fiber& fiber = fibers_[thread];
    current = thread;
    if (_setjmp(scheduler_) == 0) {
      if (fiber.begun) _longjmp(fiber.context, 1);
      fiber.begun = true;
      getcontext(&fiber.begin);
      fiber.begin.uc_stack.ss_sp = stacks + thread * STACK_BYTES;
      fiber.begin.uc_stack.ss_size = STACK_BYTES;
      makecontext(&fiber.begin, enter, 0);
      setcontext(&fiber.begin);
    }
    current = -1;
  }

  // Runs each lane of a warp until it waits, and lets an exchange happen.
  void advance(int warp) {
    Fiber* lanes = &fibers_[warp * 32];
    const uint32_t order = random_();
    for (int i = 0; i < 32; ++i) {
      const int lane = static_cast<int>((i ^ order) % 32);
      if (lanes[lane].at == At::nothing) resume(warp * 32 + lane);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const At at = lanes[lane].at;
      if (at == At::barrier || at == At::end) continue;
      for (int other = 0; other < 32; ++other)
        if (lanes[other].at != at || lanes[other].site != lanes[lane].site) {
          current = warp * 32 + other;
          fail("missing from an exchange of its warp with lane", lane);
        }
      for (int each = 0; each < 32; ++each) {
        given_[warp][each] = lanes[each].value;
        lanes[each].at = At::nothing;
      }
      return;
    }
  }

  bool any(int threads, At at) const {
    for (int thread = 0; thread < threads; ++thread)
      if (fibers_[thread].at == at) return true;
    return false;
  }

  // Returns false where all threads have ended. Those that have are not waited for.
  bool pass_barrier(int threads) {
    const void* site = nullptr;
    for (int thread = 0; thread < threads; ++thread) {
      Fiber& fiber = fibers_[thread];
      if (fiber.at == At::end) continue;
      current = thread;
      if (site != nullptr && fiber.site != site) fail("at another barrier than a thread of its block", 0);
      site = fiber.site;
      fiber.at = At::nothing;
    }
    current = -1;
    ++now;
    return site != nullptr;
  }

  static inline Block* running_ = nullptr;
  std::mt19937 random_;
  std::vector<Fiber> fibers_;
  void (*kernel_)() = nullptr;
  jmp_buf scheduler_;
  int given_[MAX_THREADS / 32][32];
};

}  // namespace host

extern "C" {

unsigned host_thread() { return static_cast<unsigned>(host::current); }
unsigned host_block() { return host::block; }
void host_block_barrier() { host::Block::wait(host::At::barrier, 0, __builtin_return_address(0)); }
int host_shuffle(unsigned mask, int value, int source) {
  return host::Block::meet(host::At::shuffle, mask, value, __builtin_return_address(0))[source & 31];
}
unsigned host_ballot(unsigned mask, bool condition) {
  const int* given = host::Block::meet(host::At::ballot, mask, condition, __builtin_return_address(0));
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(given[lane]) << lane;
  return all;
}
int host_largest(unsigned mask, int value) {
  const int* given = host::Block::meet(host::At::largest, mask, value, __builtin_return_address(0));
  int largest = given[0];
  for (int lane = 1; lane < 32; ++lane) largest = given[lane] > largest ? given[lane] : largest;
  return largest;
}
int host_sum(unsigned mask, int value) {
  const int* given = host::Block::meet(host::At::sum, mask, value, __builtin_return_address(0));
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += given[lane];
  return sum;
}

}  // extern "C"
