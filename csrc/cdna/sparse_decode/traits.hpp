// The sparse decode kernel of a problem: which parts it is made of, given how waves share a tile and how PV reads it.
#pragma once

#include "cdna/sparse_decode/epilogue.hpp"
#include "cdna/sparse_decode/kernel.hpp"
#include "cdna/sparse_decode/mainloop.hpp"
#include "cdna/sparse_decode/problem.hpp"
#include "cdna/sparse_decode/producer_dequant.hpp"

namespace cdna::sparse {

template <class Problem, class Policy, class Partition, template <class, class, class> class PvMma>
struct DecodeTraits {
  using Producer = DequantProducer<typename Problem::KvFormat, Partition::keys, Partition::waves>;
  using Pv = PvMma<typename Problem::KvFormat, Partition, typename Producer::Tile>;
  using Mainloop = SparseMainloop<Problem, Policy, Partition, Producer, Pv>;
  using Epilogue = SparseEpilogue<Problem, Policy>;
  using Kernel = SparseDecodeKernel<Problem, Policy, TileScheduler<SparseQueryTokens>, Producer, Mainloop, Epilogue>;
};

}  // namespace cdna::sparse
