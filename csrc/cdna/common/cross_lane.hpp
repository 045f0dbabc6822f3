// Exchange of values between the lanes of a wave.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

// Returns the value of x in lane `lane`, which may differ from lane to lane.
MLA_DEVICE float shuffle(float x, int lane) {
  return mla::bit_cast<float>(__builtin_amdgcn_ds_bpermute(lane * 4, mla::bit_cast<int>(x)));
}

MLA_DEVICE const char* shuffle(const char* x, int lane) {
  const uint64_t bits = reinterpret_cast<uint64_t>(x);
  const uint32_t low = static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(lane * 4, static_cast<int>(bits)));
  const uint32_t high = static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(lane * 4, static_cast<int>(bits >> 32)));
  return reinterpret_cast<const char*>(static_cast<uint64_t>(high) << 32 | low);
}

// Returns a value that is the same in all lanes, in a scalar register.
MLA_DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }

// Returns true in every lane when `condition` holds in any.
MLA_DEVICE bool any_lane(bool condition) { return __builtin_amdgcn_ballot_w64(condition) != 0; }

// Return the maximum and the sum over the four lanes that share a column (lanes l, l ^ 16, l ^ 32, l ^ 48), in all of
// them. The order of the additions is the same in each, so the sums are the same bits.
MLA_DEVICE float max_over_groups(float x, const Lane& lane) {
  x = __builtin_fmaxf(x, shuffle(x, lane.index ^ 16));
  return __builtin_fmaxf(x, shuffle(x, lane.index ^ 32));
}
MLA_DEVICE float sum_over_groups(float x, const Lane& lane) {
  x += shuffle(x, lane.index ^ 16);
  return x + shuffle(x, lane.index ^ 32);
}

// Returns the value that one lane holds, in scalar registers.
MLA_DEVICE uint32_t broadcast(uint32_t x, int lane) {
  return static_cast<uint32_t>(__builtin_amdgcn_readlane(static_cast<int>(x), lane));
}
MLA_DEVICE const char* broadcast(const char* p, int lane) {
  const uint64_t bits = reinterpret_cast<uint64_t>(p);
  const uint64_t low = broadcast(static_cast<uint32_t>(bits), lane);
  const uint64_t high = broadcast(static_cast<uint32_t>(bits >> 32), lane);
  return reinterpret_cast<const char*>(high << 32 | low);
}

}  // namespace cdna
