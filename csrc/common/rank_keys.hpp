// Which keys of a sequence lie on a rank, where runs of cp_interleave keys are dealt to the ranks in turn.
#pragma once

#include "common/division.hpp"

namespace mla {

// How many of the sequence's first `keys` keys lie on this rank; none of a negative number.
template <class Params>
MLA_DEVICE int keys_of_rank(const Params& p, int keys) {
  if (keys <= 0) return 0;
  const int periods = static_cast<int>(divided(static_cast<uint32_t>(keys), p.cp_period_reciprocal, p.cp_period_shift));
  const int rest = keys - periods * p.cp_period - p.cp_offset;
  const int own = rest < 0 ? 0 : rest < p.cp_interleave ? rest : p.cp_interleave;
  return periods * p.cp_interleave + own;
}

}  // namespace mla
