// The sparse decode kernel of a problem: which parts it is made of.
#pragma once

#include "cdna/sparse_decode/epilogue.hpp"
#include "cdna/sparse_decode/kernel.hpp"
#include "cdna/sparse_decode/mainloop.hpp"
#include "cdna/sparse_decode/problem.hpp"
#include "cdna/sparse_decode/producer_dequant.hpp"
#include "cdna/sparse_decode/wave_partition.hpp"

namespace cdna::sparse {

template <class Problem, class Policy>
struct DecodeTraits {
  using Partition = WavePartition<Problem::row_tiles>;
  using Producer = DequantProducer<typename Problem::KvFormat, Partition::keys, Partition::waves>;
  using Mainloop = SparseMainloop<Problem, Policy, Partition, Producer>;
};

template <class Problem, class Policy>
using Decode = SparseDecodeKernel<Problem, Policy, TileScheduler<SparseQueryTokens>,
                                  typename DecodeTraits<Problem, Policy>::Producer,
                                  typename DecodeTraits<Problem, Policy>::Mainloop, SparseEpilogue<Policy>>;

}  // namespace cdna::sparse
