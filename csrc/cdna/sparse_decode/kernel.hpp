// The sparse decode kernel: attention of one query token's heads over selected tokens, in one launch.
//
// The roles are those of cdna/decode/kernel.hpp. Each work tile begins with a table of the token's lists, from which
// the producer gathers.
#pragma once

#include "cdna/common/kernel_params.hpp"
#include "cdna/common/tile_scheduler.hpp"
#include "cdna/sparse_decode/topk_lists.hpp"

namespace cdna::sparse {

template <class Problem, class Policy, class TileScheduler, class Producer, class Mainloop, class Epilogue>
class SparseDecodeKernel {
  using Lds = typename Mainloop::Lds;
  static_assert(Lds::bytes <= Policy::lds_bytes, "sparse decode: the workgroup needs more LDS than the arch has");

 public:
  static constexpr int threads = Policy::waves * WAVE;
  static constexpr int lds_bytes = Lds::bytes;

  MLA_DEVICE static void run(LdsBytes lds) {
    const int wave = wave_id();
    const int first_row = mla::block_id_y() * Problem::rows;
    for (TileScheduler scheduler(reread_params<mla::SparseDecodeParams>(), mla::block_id_x()); scheduler.has_next();) {
      const mla::SparseDecodeParams& p = reread_params<mla::SparseDecodeParams>();
      const uint32_t base = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds));
      if (wave == 0) TopkLists::fill(p, scheduler.sequence(p), base + Lds::lists, Problem::KvFormat::has_fp4 ? p.fp4 : 0);
      mla::block_sync();
      const TopkLists lists(base + Lds::lists);
      Mainloop mainloop(p, scheduler.fetch_next(p, [keys = lists.keys()](int) { return keys; }), first_row, base, wave);
      mainloop.template attend<Producer>(p, lists);
      mainloop.template store<Epilogue>(reread_params<mla::SparseDecodeParams>());
    }
  }
};

}  // namespace cdna::sparse
