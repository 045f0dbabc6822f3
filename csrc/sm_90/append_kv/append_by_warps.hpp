// append_kv of up to eight tokens by a block of eight warps, for rows of one warp as in record_row.hpp: each warp writes a
// token, and all of them look for later tokens with the slots of the block's.
//
// Every load that does not depend on another is issued before the first is waited for, and a row is encoded before the
// block is: what the look finds decides only whether it is stored.
#pragma once

#include "sm_90/append_kv/row_buffer.hpp"

namespace mla::sm_90 {

struct AppendByWarps {
  using Params = mla::AppendKvParams;
  static constexpr int warps = 8, threads = 32 * warps;
  static constexpr int ahead = 4;  // slots that a thread loads together

  static constexpr uint32_t row_bytes = 1280;

  struct Shared {
    __align__(16) uint8_t rows[warps * row_bytes];
    uint32_t found[warps];  // by each warp: a bit for each of the block's tokens
  };

  template <class Row>
  MLA_DEVICE static void run(const Params& p, Shared& shared, Row row) {
    static_assert(RowBuffer<Row>::bytes == row_bytes);
    const int thread = mla::thread_id(), lane = thread % 32;
    const int warp = Wave::uniform(thread / 32);
    const int first = mla::block_id_x() * p.group, token = first + warp;
    const int count = p.tokens - first < p.group ? p.tokens - first : p.group;
    const bool writes = warp < count;
    const RowBuffer<Row> buffer{smem_address(shared.rows) + warp * row_bytes};
    const RowSource<Row> source(p, lane);
    Wave::wait_for_producer();
    Wave::release_consumer();
    RawIndex own, position, later[ahead];
    if (lane < count) own.load(p.slot_mapping, p.wide_slots, first + lane);
    if (writes) {
      if constexpr (Row::rotated) position.load(p.positions, p.wide_positions, token);
      source.copy(p, token, buffer);
    }
    int base = first + count;
    load(p, base + thread, later);
    const int slots = own.slot(p);  // lane i has the i-th token's
    const int slot = Wave::from_lane(slots, warp);
    const bool again = Wave::any(lane > warp && slots == slot);
    if (writes && slot >= 0) source.copy_angle(p, position.low, buffer);
    cp_async_commit();
    uint32_t seen = 0;
#pragma unroll 1
    for (;;) {
      seen |= among(p, base + thread, later, slots, count);
      base += ahead * threads;
      if (base >= p.tokens) break;
      load(p, base + thread, later);
    }
    if (lane == 0) shared.found[warp] = seen;
    if (!writes) return __syncthreads();
    cp_async_wait<0>();
    __syncwarp();
    row.read(p, buffer.at, lane);
    const auto encoded = row.encoded(p);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < warps; ++i) seen |= shared.found[i];
    if (slot >= 0 && !again && (seen >> warp & 1) == 0) encoded.store(Row::place(p, slot), lane);
  }

 private:
  // Every threads-th slot from `token` on, and in place of those that are none the last: loads without branches are not
  // waited for one by one.
  MLA_DEVICE static void load(const Params& p, int token, RawIndex (&later)[ahead]) {
#pragma unroll
    for (int i = 0; i < ahead; ++i)
      later[i].load(p.slot_mapping, p.wide_slots, min(token + i * threads, p.tokens - 1));
  }

  // Bit k: a lane of the warp has loaded the slot of the block's k-th token. The block has `count` tokens.
  MLA_DEVICE static uint32_t among(const Params& p, int token, const RawIndex (&later)[ahead], int slots, int count) {
    int those[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) those[i] = token + i * threads < p.tokens ? later[i].slot(p) : -1;
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < warps; ++k) {
      if (k == 1 && count == 1) break;  // for each k, its shuffle would wait for the one before
      const int slot = Wave::from_lane(slots, k);
      bool any = false;
#pragma unroll
      for (const int that : those) any |= that == slot;
      bits |= static_cast<uint32_t>(Wave::any(any)) << k;
    }
    return bits;
  }
};

}  // namespace mla::sm_90
