// cp.async on a CPU: a thread's copies land together, when the block's scheduler lets them, and arrive then; those of a
// group land when they are waited for.
#pragma once

#include "sm_90/ptx/tma.hpp"

namespace mla::sm_90 {

inline OfEachBlock<std::vector<Piece>, BLOCK_THREADS> open_copies;

template <int BYTES>
void cp_async_zfill(uint32_t to, uint64_t from, bool valid) {
  if (valid && from % BYTES != 0) fail("no such global address", static_cast<long>(from));
  open_copies[current].push_back({of_cluster(to), valid ? reinterpret_cast<const void*>(from) : nullptr, BYTES});
}
template <int BYTES>
void cp_async_zfill_if(bool active, uint32_t to, uint64_t from, bool valid) {
  if (active) cp_async_zfill<BYTES>(to, from, valid);
}
template <int TO, int FROM>
void cp_async_16_zfill_at(uint32_t to, uint64_t from, bool valid) {
  cp_async_zfill<16>(to + TO, from + FROM, valid);
}
inline void cp_async_16_l2_256(uint32_t to, const void* from, bool valid) {
  cp_async_16_zfill_at<0, 0>(to, reinterpret_cast<uint64_t>(from), valid);
}
inline void cp_async_mbarrier_arrive(uint32_t barrier) {
  bulk_copies.push_back({open_copies[current], of_cluster(barrier), 0});
  open_copies[current].clear();
}

inline OfEachBlock<std::vector<std::vector<Piece>>, BLOCK_THREADS> open_groups;

inline void cp_async_commit() {
  open_groups[current].push_back(open_copies[current]);
  open_copies[current].clear();
}
template <int PENDING>
void cp_async_wait() {
  auto& groups = open_groups[current];
  while (groups.size() > PENDING) {
    for (const Piece& piece : groups.front()) piece.land();
    groups.erase(groups.begin());
  }
}

}  // namespace mla::sm_90
