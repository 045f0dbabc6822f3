// append_kv of one token by a block of eight warps, for rows as in row.hpp: all warps search for a later token with the
// same slot, one holds the latents and one the rope part. Every load that does not depend on another is issued before
// the first is waited for.
#pragma once

#include "sm_90/append_kv/row.hpp"

namespace mla::sm_90 {

struct AppendSingle {
  using Params = mla::AppendKvParams;
  static constexpr int threads = 256;
  static constexpr int ahead = 2;  // slots that a thread loads together

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
    const bool later = seen_later(p, own, token + 1 + thread);
    const int slot = own.slot(p);
    if (wave == 1 && slot >= 0) row.load_angle(p, position.low, lane);
    if (__syncthreads_or(later) != 0 || slot < 0) return;
    if (wave == 0) row.store_latent(p, Row::place(p, slot), lane);
    if (wave == 1) row.store_rope(p, Row::place(p, slot), lane);
  }

 private:
  // Whether a token from `first` on, or every threads-th behind it, has the same slot.
  MLA_DEVICE static bool seen_later(const Params& p, const RawIndex& own, int first) {
    bool later = false;
#pragma unroll 1
    for (int base = first; base < p.tokens; base += ahead * threads) {
      RawIndex other[ahead];
      for (int i = 0; i < ahead; ++i)
        if (base + i * threads < p.tokens) other[i].load(p.slot_mapping, p.wide_slots, base + i * threads);
      for (int i = 0; i < ahead; ++i)
        later |= base + i * threads < p.tokens && other[i].low == own.low && other[i].high == own.high;
    }
    return later;
  }
};

}  // namespace mla::sm_90
