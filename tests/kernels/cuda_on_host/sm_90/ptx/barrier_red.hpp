// Named barriers with a result on a CPU.
#pragma once

#include "sm_90/ptx/mbarrier.hpp"

namespace mla::sm_90 {

template <int ID, int THREADS>
bool named_barrier_any(bool any) {
  return at_named_barrier(ID, THREADS, any);
}

}  // namespace mla::sm_90
