// Runs a block on a CPU: in every round all threads that have not ended run until they wait, in an order that changes;
// some warps sleep for a round, one for many, and copies arrive late and in any order. Shared memory begins as NaN of every type.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <memory>
#include <random>

#include "sm_90/ptx/tma.hpp"

class Block {
 public:
  explicit Block(uint32_t seed) : random_(seed), stacks_(new char[BLOCK_THREADS * STACK_BYTES]) { running_ = this; }

  // False where threads wait for what never comes.
  bool run(void (*kernel)()) {
    using namespace mla::sm_90;
    std::memset(memory, 0xFF, SHARED_BYTES);
    mbarriers.clear();
    kernel_ = kernel;
    for (int thread = 0; thread < BLOCK_THREADS; ++thread) start(thread);
    std::vector<int> order(BLOCK_THREADS);
    for (int thread = 0; thread < BLOCK_THREADS; ++thread) order[thread] = thread;
    uint32_t late = 0;  // a bit for the warp that falls behind
    for (int left = BLOCK_THREADS, quiet = 0, round = 0; left != 0; ++round) {
      const long before = events;
      if (random_() % 4 == 0) std::shuffle(order.begin(), order.end(), random_);
      if (round % (2 * LATE_ROUNDS) == 0) late = 1u << random_() % (BLOCK_THREADS / 32);
      if (round % (2 * LATE_ROUNDS) == LATE_ROUNDS) late = 0;
      const uint32_t asleep = (random_() & random_()) | late;  // a bit for each warp
      for (const int thread : order)
        if (!ended_[thread] && (asleep >> thread / 32 & 1) == 0 && !waits(thread)) resume(thread);
      while (!bulk_copies.empty() && random_() % 2 == 0) copy(random_() % bulk_copies.size());
      left = static_cast<int>(std::count(ended_, ended_ + BLOCK_THREADS, false));
      quiet = events == before && bulk_copies.empty() ? quiet + 1 : 0;
      if (quiet > MAX_QUIET_ROUNDS) return false;
    }
    return true;
  }

  static void leave() {
    if (_setjmp(running_->threads_[current].context) == 0) _longjmp(running_->scheduler_, 1);
  }
  // Returns once `number` has changed; until then the thread is not resumed.
  static void leave_until_changed(const long& number) {
    Thread& thread = running_->threads_[current];
    thread.awaited = &number;
    thread.before = number;
    while (number == thread.before) leave();
    thread.awaited = nullptr;
  }

 private:
  static constexpr size_t STACK_BYTES = 128 << 10;
  static constexpr int LATE_ROUNDS = 200;  // longer than a warp takes for a product
#if defined(MLA_MAX_TRIES)
  static constexpr int MAX_QUIET_ROUNDS = 2 * MLA_MAX_TRIES;  // a debug build ends by itself; some warps sleep
#else
  static constexpr int MAX_QUIET_ROUNDS = 400;
#endif

  // A switch by setjmp and longjmp needs no system call, which one of ucontext does; that begins a thread.
  struct Thread {
    jmp_buf context;
    ucontext_t begin;
    bool begun;
    const long* awaited;
    long before;
  };

  static void enter() {
    running_->kernel_();
    running_->ended_[current] = true;
    ++events;
    leave();
  }
  void start(int thread) {
    ended_[thread] = threads_[thread].begun = false;
    threads_[thread].awaited = nullptr;
  }
  bool waits(int thread) const {
    const long* awaited = threads_[thread].awaited;
    return awaited != nullptr && *awaited == threads_[thread].before;
  }
  void resume(int thread) {
    Thread& resumed = threads_[thread];
    current = thread;
    if (_setjmp(scheduler_) != 0) return;
    if (resumed.begun) _longjmp(resumed.context, 1);
    resumed.begun = true;
    getcontext(&resumed.begin);
    resumed.begin.uc_stack.ss_sp = &stacks_[thread * STACK_BYTES];
    resumed.begin.uc_stack.ss_size = STACK_BYTES;
    makecontext(&resumed.begin, enter, 0);
    setcontext(&resumed.begin);
  }
  static void copy(size_t number) {
    using namespace mla::sm_90;
    const BulkCopy done = bulk_copies[number];
    bulk_copies.erase(bulk_copies.begin() + static_cast<long>(number));
    done.land();
  }

  static inline Block* running_ = nullptr;
  std::mt19937 random_;
  std::unique_ptr<char[]> stacks_;  // not cleared, since most of its pages are never touched
  void (*kernel_)() = nullptr;
  jmp_buf scheduler_;
  Thread threads_[BLOCK_THREADS];
  bool ended_[BLOCK_THREADS];
};

inline void yield() { Block::leave(); }
inline void yield_until_changed(const long& number) { Block::leave_until_changed(number); }
