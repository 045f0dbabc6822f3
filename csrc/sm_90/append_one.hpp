// append_kv of one token to a workgroup of eight warps, where rows are as append_row.hpp has them: all look for a later
// token with its slot, one holds the latents and one the rope part. Whatever does not depend on another load is asked
// for before the first is waited for.
#pragma once

#include "sm_90/append_row.hpp"

namespace sm_90 {

struct AppendOne {
  using Params = mla::AppendKvParams;
  static constexpr int threads = 256;
  static constexpr int ahead = 2;  // slots that a thread asks for together

  template <class Row>
  MLA_DEVICE static void run(const Params& p, Row row) {
    const int token = mla::block_id_x(), thread = mla::thread_id(), lane = thread % 32;
    const int wave = Wave::uniform(thread / 32);
    Wave::wait_for_producer();
    Wave::release_consumer();
    RawIndex own, position;
    own.load(p.slot_mapping, p.wide_slots, token);
    if (wave == 0) row.load_latent(p, token, lane);
    if (wave == 1) {
      if constexpr (Row::rotated) position.load(p.positions, p.wide_positions, token);
      row.load_rope(p, token, lane);
    }
    bool later = false;
#pragma unroll 1
    for (int base = token + 1 + thread; base < p.tokens; base += ahead * threads) {
      RawIndex other[ahead];
      for (int i = 0; i < ahead; ++i)
        if (base + i * threads < p.tokens) other[i].load(p.slot_mapping, p.wide_slots, base + i * threads);
      for (int i = 0; i < ahead; ++i)
        later |= base + i * threads < p.tokens && other[i].low == own.low && other[i].high == own.high;
    }
    const int slot = own.slot(p);
    if (wave == 1 && slot >= 0) row.load_angle(p, position.low, lane);
    if (__syncthreads_or(later) != 0 || slot < 0) return;
    if (wave == 0) row.store_latent(p, Row::offset(p, slot), lane);
    if (wave == 1) row.store_rope(p, Row::offset(p, slot), lane);
  }
};

}  // namespace sm_90
