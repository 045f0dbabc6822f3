// The dense decode kernel: one workgroup walks its work tiles, and each wave runs the mainloop and the epilogue on
// them.
//
// The roles are template parameters, so an arch combines the parts that its instructions allow:
//   Problem        the element types, the query rows of a workgroup, the widths (common/problem.hpp)
//   Policy         the arch: waves of a workgroup, LDS size, conversions, elementary functions
//   TileScheduler  the KV splits that a workgroup processes
//   Producer       how keys come from memory to where the mainloop reads them
//   Mainloop       QK^T, online softmax and PV over the keys of one work tile
//   Epilogue       the target of a finished row: out and lse, or a row of the partial results
#pragma once

#include "cdna/common/kernel_params.hpp"
#include "cdna/common/lds.hpp"
#include "cdna/common/tile_scheduler.hpp"
#include "cdna/decode/shared_storage.hpp"
#include "common/mask.hpp"
#include "common/problem.hpp"

namespace cdna {

template <class Problem, class Policy, class TileScheduler, class Producer, class Mainloop, class Epilogue>
class DecodeKernel {
 public:
  static constexpr int threads = Policy::waves * WAVE;
  static constexpr int lds_bytes = SharedStorage<Policy, Producer, Mainloop>::bytes;

  // The mainloop decides how many row tiles each wave holds, and calls `run_wave` with a type for that number.
  MLA_DEVICE static void run(LdsBytes lds) { Mainloop::template run_waves<DecodeKernel>(lds); }

  // The work tiles of one wave. `WaveMainloop` is the mainloop's part that one wave executes.
  template <class WaveMainloop>
  MLA_DEVICE static void run_wave(LdsBytes lds, int wave) {
    for (TileScheduler scheduler(reread_params<mla::DecodeParams>(), mla::block_id_x()); scheduler.has_next();) {
      TileParams<Policy::loads_params_together, mla::DecodeParams> p = reread_params<mla::DecodeParams>();
      if constexpr (Policy::loads_params_together) {
        loaded(p.plan, p.num_splits, p.grid_stride, p.split_size, p.seq_lens, p.cu_seqlens_q, p.q_len, p.heads, p.rows,
               p.window_left, p.q, p.q_batch_stride, p.q_token_stride, p.q_head_stride, p.kv_cache, p.kv_page_stride,
               p.kv_token_stride, p.page, p.page_reciprocal, p.page_shift, p.block_table, p.block_table_stride,
               p.q_descale, p.kv_descale, p.softmax_scale, p.causal);
      }
      // The last row tiles come first, since those of an extend see the most keys.
      const int first_row = ((p.rows - 1) / Problem::rows - mla::block_id_y()) * Problem::rows;
      mla::SequenceRows rows;
      mla::WorkTile tile = scheduler.fetch_next(p, [&](int sequence) {
        rows = mla::SequenceRows::of(p, sequence);
        return rows.kv_len - mla::window_origin(rows.first_read(p));
      });
      const int first_read = rows.first_read(p), origin = mla::window_origin(first_read);
      tile.first_key = origin + tile.first_key < first_read ? first_read : origin + tile.first_key;
      tile.end_key += origin;
      if (first_row >= rows.rows) {
        tile.end_key = tile.first_key;  // no query row: nothing to read
      } else if (rows.q_len > 32) {  // fewer tokens hide a tile of keys or two from each other
        // Worked out in vector registers, since the parameters take the scalar ones.
        rows.clip_to_seen(p, rematerialized(first_row), Problem::rows, &tile);
        tile.first_key = uniform(tile.first_key);
        tile.end_key = uniform(tile.end_key);
      }
      // LLVM 20 keeps a partial row that a plan names in four registers of every lane without this hint.
      if constexpr (Mainloop::scalar_partial_row) tile.partial_row = uniform(tile.partial_row);
      WaveMainloop mainloop(p, tile, rows, first_row, lds, wave);
      mainloop.template attend<Producer>(p);
      mainloop.finish();
      TileParams<Policy::loads_params_together, mla::DecodeParams> last = reread_params<mla::DecodeParams>();
      if constexpr (Policy::loads_params_together) {
        loaded(last.heads, last.rows, last.out, last.lse, last.out_token_stride, last.out_head_stride, last.partial_out,
               last.partial_lse, last.attn_sink, last.kv_descale, last.q);
      }
      mainloop.template store<Epilogue>(last);
      if constexpr (Mainloop::sync_after_tile) mla::block_sync();
    }
  }
};

}  // namespace cdna
