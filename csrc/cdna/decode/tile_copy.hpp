// The copy of a later tile of keys, in parts that a mainloop places between the products of QK^T: a matrix instruction
// leaves a wave 12 clocks in which it may issue others.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

template <class Producer>
struct TileCopy {
  static constexpr int parts = Producer::parts;
  Producer& producer;
  int tile;
  decltype(Producer::next_stage(0)) stage;  // where the tile is copied to, in the producer's words

  // Keys that the mainloop has begun to read arrive ahead of what the copy reads.
  MLA_DEVICE void begin() const {
    __builtin_amdgcn_sched_barrier(0);
    producer.begin_copy(tile, stage);
  }
  MLA_DEVICE void part(int n) const {
    if (n < parts) producer.copy_part(n);
  }
  MLA_DEVICE void whole() const { producer.copy(tile, stage); }
};

// Ends a turn of a loop behind its products. On the way back LLVM 22 counts the branch that follows the loop's own as a
// wait state, though it is not executed, and leaves a product one too few. It counts none for assembly.
MLA_DEVICE void end_turn() {
  __builtin_amdgcn_sched_barrier(0);
  asm volatile("s_nop 0");
}

struct NoCopy {
  static constexpr int parts = 0;
  MLA_DEVICE void begin() const {}
  MLA_DEVICE void part(int) const {}
  MLA_DEVICE void whole() const {}
};

}  // namespace cdna
