// The dense decode kernel of archs with 16x16x16 matrix instructions (CDNA3): which parts a problem is made of.
#pragma once

#include "cdna/decode/epilogue.hpp"
#include "cdna/decode/kernel.hpp"
#include "cdna/decode/mfma_16x16x16/mainloop_key_split.hpp"
#include "cdna/decode/mfma_16x16x16/mainloop_row_split.hpp"
#include "cdna/decode/mfma_16x16x16/producer_fp8_stage.hpp"
#include "cdna/decode/mfma_16x16x16/producer_kv_stage.hpp"
#include "cdna/decode/mfma_16x16x16/producer_registers.hpp"

namespace cdna::mfma_16x16x16 {

// More than one row tile: the waves share stages of keys in LDS and split the rows. An fp8 cache is converted to bf16
// as it enters a stage.
template <class Problem, class Policy, bool one_row_tile = Problem::row_tiles == 1,
          bool fp8 = Problem::Format::bytes == 1>
struct DecodeTraits {
  using Producer = KvStageProducer<Problem, Policy>;
  using Mainloop = RowSplitMainloop<Problem, Policy>;
};
template <class Problem, class Policy>
struct DecodeTraits<Problem, Policy, false, true> {
  using Producer = Fp8StageProducer<Problem, Policy>;
  using Mainloop = RowSplitMainloop<Problem, Policy>;
};

// One row tile: every wave holds it and the waves split the keys.
template <class Problem, class Policy, bool fp8>
struct DecodeTraits<Problem, Policy, true, fp8> {
  using Producer = RegisterProducer<Problem, Policy>;
  using Mainloop = KeySplitMainloop<Problem, Policy>;
};

template <class Problem, class Policy>
using Decode =
    DecodeKernel<Problem, Policy, TileScheduler<DecodeSequences>, typename DecodeTraits<Problem, Policy>::Producer,
                 typename DecodeTraits<Problem, Policy>::Mainloop, DecodeEpilogue<Problem, Policy>>;

}  // namespace cdna::mfma_16x16x16
