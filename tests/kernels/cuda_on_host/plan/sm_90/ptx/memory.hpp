// A prefetch on a CPU: a load like any other, whose word may be anyone's. plan materializes nothing.
#pragma once

extern "C" void host_prefetch(const void* address);

namespace mla::sm_90 {

inline void prefetch_l1(const void* address) { host_prefetch(address); }
template <class... Words>
void materialize(Words...);

}  // namespace mla::sm_90
