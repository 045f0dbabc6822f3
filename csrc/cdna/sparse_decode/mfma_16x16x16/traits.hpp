// The sparse decode kernel of a problem on CDNA3.
#pragma once

#include "cdna/sparse_decode/mfma_16x16x16/pv.hpp"
#include "cdna/sparse_decode/mfma_16x16x16/wave_partition.hpp"
#include "cdna/sparse_decode/traits.hpp"

namespace cdna::sparse::mfma_16x16x16 {

template <class Problem, class Policy>
using Decode = typename DecodeTraits<Problem, Policy, WavePartition<Problem::row_tiles>, PvMma>::Kernel;

}  // namespace cdna::sparse::mfma_16x16x16
