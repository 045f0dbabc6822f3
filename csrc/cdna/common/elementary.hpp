// The elementary functions that every CDNA arch has as instructions. exp2 flushes denormal results to zero, which the
// softmax of an attention row allows.
#pragma once

#include "cdna/common/types.hpp"

namespace cdna {

struct Elementary {
  MLA_DEVICE static float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
  MLA_DEVICE static float log2(float x) { return __builtin_amdgcn_logf(x); }
  MLA_DEVICE static float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
};

}  // namespace cdna
