// Runs a block, or the blocks of a cluster, on a CPU: in every round all threads that have not ended run until they wait,
// in an order that changes; some warps sleep for a round, one for many, and copies arrive late, some of them very late, and
// in any order. With HOST_STOPS a block stops now and then behind an arrival at a peer, until the others wait for it.
// Shared memory begins as NaN of every type, and ends with the last thread of its block.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <memory>
#include <random>

#include "sm_90/ptx/tma.hpp"

class Block {
 public:
  explicit Block(uint32_t seed) : random_(seed), stacks_(new char[THREADS * STACK_BYTES]) { running_ = this; }

  // Runs the block that blockIdx names, or those of the cluster that begins with it. False where threads wait for what
  // never comes.
  bool run(void (*kernel)()) {
    using namespace mla::sm_90;
    std::memset(memory, 0xFF, sizeof memory);
    mbarriers.clear();
    std::fill(ended_blocks, ended_blocks + CLUSTER_BLOCKS, false);
    kernel_ = kernel;
    first_ = blockIdx;
    for (int thread = 0; thread < THREADS; ++thread) start(thread);
    std::vector<int> order(THREADS);
    for (int thread = 0; thread < THREADS; ++thread) order[thread] = thread;
    uint64_t late = 0;     // a bit for the warp that falls behind
    uint64_t stopped = 0;  // bits for the warps of a block that is
    for (int left = THREADS, quiet = 0, round = 0; left != 0; ++round) {
      const long before = events;
      if (random_() % 4 == 0) std::shuffle(order.begin(), order.end(), random_);
      if (round % (2 * LATE_ROUNDS) == 0) late = uint64_t{1} << random_() % (THREADS / 32);
      if (round % (2 * LATE_ROUNDS) == LATE_ROUNDS) late = 0;
      if (quiet > STOPPED_QUIET_ROUNDS) stopped = 0;
      if (sent_to_peer >= 0 && stopped == 0 && random_() % max(HOST_STOPS, 1) == 0) stopped = bits_of_block(sent_to_peer);
      sent_to_peer = -1;
      const uint64_t asleep = bits_for_warps() | late | stopped;  // a bit for each warp
      for (const int thread : order)
        if (!ended_[thread] && (asleep >> thread / 32 & 1) == 0 && !waits(thread)) resume(thread);
      for (BulkCopy& each : bulk_copies)
        if (each.earliest < 0) each.earliest = round + (random_() % LATE_COPIES == 0 ? LATE_ROUNDS : 0);
      while (!bulk_copies.empty() && random_() % 2 == 0) {
        const size_t number = random_() % bulk_copies.size();
        if (bulk_copies[number].earliest <= round) copy(number);
      }
      left = 0;
      for (int number = 0; number < CLUSTER_BLOCKS; ++number) {
        const bool* threads = ended_ + number * BLOCK_THREADS;
        const int of_block = static_cast<int>(std::count(threads, threads + BLOCK_THREADS, false));
        ended_blocks[number] = of_block == 0;
        left += of_block;
      }
      quiet = events == before && bulk_copies.empty() ? quiet + 1 : 0;
      if (quiet > MAX_QUIET_ROUNDS) return false;
    }
    if (!bulk_copies.empty()) fail("copies that nobody has waited for:", static_cast<long>(bulk_copies.size()));
    return true;
  }

  static void leave() {
    if (_setjmp(running_->threads_[running()].context) == 0) _longjmp(running_->scheduler_, 1);
  }
  // Returns once `number` has changed; until then the thread is not resumed.
  static void leave_until_changed(const long& number) {
    Thread& thread = running_->threads_[running()];
    thread.awaited = &number;
    thread.before = number;
    while (number == thread.before) leave();
    thread.awaited = nullptr;
  }

 private:
  static constexpr int THREADS = CLUSTER_BLOCKS * BLOCK_THREADS;
  static constexpr size_t STACK_BYTES = 128 << 10;
  static constexpr int LATE_ROUNDS = 200;  // longer than a warp takes for a product
  static constexpr int LATE_COPIES = 16;   // one of so many arrives as late
  static constexpr int STOPPED_QUIET_ROUNDS = LATE_ROUNDS + 50;  // a block is stopped longer than any other warp
#if defined(MLA_MAX_TRIES)
  static constexpr int MAX_QUIET_ROUNDS = 2 * MLA_MAX_TRIES;  // a debug build ends by itself; some warps sleep
#else
  static constexpr int MAX_QUIET_ROUNDS = 400;
#endif

  static int running() { return current_block * BLOCK_THREADS + current; }
  uint64_t bits_for_warps() {
    const auto half = [&] { return static_cast<uint64_t>(random_() & random_()); };
    return THREADS <= 1024 ? half() : half() << 32 | half();
  }

  static uint64_t bits_of_block(int number) {
    constexpr int WARPS = BLOCK_THREADS / 32;
    return ((uint64_t{1} << WARPS % 64) - 1) << number * WARPS;
  }

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
    running_->ended_[running()] = true;
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
    current = thread % BLOCK_THREADS;
    current_block = thread / BLOCK_THREADS;
    blockIdx = {first_.x + current_block % CLUSTER_X, first_.y + current_block / CLUSTER_X, first_.z};
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
  decltype(blockIdx) first_{};  // of the cluster's blocks
  Thread threads_[THREADS];
  bool ended_[THREADS];
};

inline void yield() { Block::leave(); }
inline void yield_until_changed(const long& number) { Block::leave_until_changed(number); }
