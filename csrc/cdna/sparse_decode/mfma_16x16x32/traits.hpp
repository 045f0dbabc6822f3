// The sparse decode kernel of a problem on CDNA4: which parts it is made of.
#pragma once

#include "cdna/sparse_decode/epilogue.hpp"
#include "cdna/sparse_decode/kernel.hpp"
#include "cdna/sparse_decode/mainloop.hpp"
#include "cdna/sparse_decode/mfma_16x16x32/pv.hpp"
#include "cdna/sparse_decode/mfma_16x16x32/wave_partition.hpp"
#include "cdna/sparse_decode/problem.hpp"
#include "cdna/sparse_decode/producer_dequant.hpp"

namespace cdna::sparse::mfma_16x16x32 {

template <class Problem, class Policy>
struct DecodeTraits {
  using Partition = WavePartition<Problem::row_tiles>;
  using Producer = DequantProducer<typename Problem::KvFormat, Partition::keys, Partition::waves>;
  using Pv = PvMma<typename Problem::KvFormat, Partition, typename Producer::Tile>;
  using Mainloop = SparseMainloop<Problem, Policy, Partition, Producer, Pv>;
};

template <class Problem, class Policy>
using Decode = SparseDecodeKernel<Problem, Policy, TileScheduler<SparseQueryTokens>,
                                  typename DecodeTraits<Problem, Policy>::Producer,
                                  typename DecodeTraits<Problem, Policy>::Mainloop, SparseEpilogue<Policy>>;

}  // namespace cdna::sparse::mfma_16x16x32
