// A prefetch on a CPU: a load like any other, whose word may be anyone's.
#pragma once

extern "C" void host_prefetch(const void* address);

namespace mla::sm_90 {

inline void prefetch_l1(const void* address) { host_prefetch(address); }
template <class... Words>
inline __attribute__((always_inline)) void materialize(Words...) {}

}  // namespace mla::sm_90
