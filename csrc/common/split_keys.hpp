// The splits of batch-invariant mode, which follow from a sequence's own length; `ops/plan/metadata.py` says why.
#pragma once

#include "common/device.hpp"

namespace mla {

// Returns the keys of each split: `split_size`, or a quarter of the keys, in whole blocks of 64, if that is less and they
// do not fit in one.
MLA_DEVICE int split_keys(int split_size, int keys) {
  if (keys <= split_size || (keys - 1) / 4 >= split_size) return split_size;
  const int quarter = ((keys - 1) / 256 + 1) * 64;
  return quarter < split_size ? quarter : split_size;
}

}  // namespace mla
