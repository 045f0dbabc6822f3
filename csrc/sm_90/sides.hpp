// Two cuts of a sequence, whose results the two blocks of a cluster share by columns: each has one side of both.
//
// Each block makes the scores and probabilities of one cut, and sends every P to the other. One of its values
// warpgroups multiplies its own P's, the other the peer's, both with this block's side of the columns. At the end the
// two merge what they have, within the block: each keeps half of the side and gives the other half away.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/results.hpp"
#include "sm_90/two_cuts.hpp"

namespace mla::sm90 {

// The work of one warp: what the scores leave in a slot goes to the peer's slot of the same number, as soon as it is
// written. The scores write there again only when both blocks are done with it.
template <class Policy>
MLA_DEVICE void send_probabilities(uint32_t shared) {
  const Barriers<Policy> barriers(shared);
  Ring<Policy::P_SLOTS> slots;
  for (int order = 0; !(order & (LAST | FINISH | STOP)); slots.next()) {
    const uint32_t from = shared + Policy::P_OFFSET + slots.stage * Policy::P_SLOT_BYTES;
    const uint32_t to = from + Policy::P_SLOTS * Policy::P_SLOT_BYTES;
    const uint32_t there = at_peer(to), full = at_peer(barriers.p_full(Policy::P_SLOTS + slots.stage));
    barrier_wait(barriers.p_written(slots.stage), slots.parity);
    fence_async();
    if (group_thread() % 32 == 0) peer_copy(there, from, Policy::P_SLOT_BYTES, full);
    __syncwarp();
    order = uniform(load_shared<int>(from + Policy::ORDER));
    barrier_arrive(barriers.p_empty(slots.stage));  // the order is read; when the rest is, both blocks' values tell
  }
}

// The merge as each values thread does it. What a warpgroup gives lies where its keys were; results get to memory by
// way of this block's own.
template <class Policy>
class Sides {
  using Params = typename Policy::Params;
  static constexpr int TILES = Policy::STORED_COLUMNS / 8;
  static constexpr int CHUNK_TILES = TILES / GIVEN_CHUNKS;
  static constexpr int GIVEN_BYTES = ROWS * Policy::STORED_COLUMNS * 4;
  static constexpr int ROOM = Policy::KV_OFFSET + GIVEN_BYTES;
  static_assert(ROOM + 8 * Results<Policy>::ROOM_BYTES <= Policy::STAGES * Policy::STAGE_BYTES);
  static_assert(GIVEN_BYTES <= Policy::PEER_STAGES * Policy::PEER_STAGE_BYTES);

 public:
  // `group` 0 has the results of this block's P's, 1 of the peer's.
  MLA_DEVICE Sides(const Results<Policy>& results, uint32_t shared, int group)
      : results_(results), barriers_(shared), shared_(shared), group_(group) {}

  // Once it is known, what this thread's rows are multiplied by; and the lse to memory.
  MLA_DEVICE void weigh(Ending& ending) const {
    barrier_wait(barriers_.weighed(), 0);
    load_weights<Policy>(shared_, group_, ending.factor);
    if (group_ == 0 && cluster_rank() == 0) results_.store_lse(ending, shared_ + Policy::BOTH_LSE);
  }

  // `o` holds the columns that this warpgroup keeps, and then those that it gives away.
  MLA_DEVICE void merge(Products& o, const Ending& ending) const {
    clear_nothing(o, ending.factor);
    group_sync(GROUP_BARRIER + group_);  // the other warps read these keys, too
    give(o, ending, 0);
    results_.store(shared_ + ROOM + (group_ * 4 + group_thread() / 32) * Results<Policy>::ROOM_BYTES, ending,
                   [&](int tile, float (&four)[4]) { both(o, tile, ending, four); });
  }

 private:
  // Where this thread's part of a tile lies in what a group gives.
  MLA_DEVICE uint32_t place(int group, int tile) const {
    return shared_ + (group == 0 ? Policy::KV_OFFSET : Policy::PEER_OFFSET) + tile * 2048 + group_thread() * 16;
  }

  MLA_DEVICE void give(const Products& o, const Ending& ending, int chunk) const {
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; ++i) {
      const int tile = chunk * CHUNK_TILES + i;
      float four[4];
      scaled_tile(o, TILES + tile, ending.factor, four);
      store16(place(group_, tile), four);
    }
    barrier_arrive(barriers_.given(group_, chunk));
  }

  // A tile that is kept, of both cuts. Before the first of a chunk, the next chunk is given.
  MLA_DEVICE void both(const Products& o, int tile, const Ending& ending, float (&four)[4]) const {
    if (tile % CHUNK_TILES == 0) {
      const int chunk = tile / CHUNK_TILES;
      if (chunk + 1 < GIVEN_CHUNKS) give(o, ending, chunk + 1);
      barrier_wait(barriers_.given(group_ ^ 1, chunk), 0);
    }
    uint32_t given[4];
    load16(place(group_ ^ 1, tile), given);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four[i] = __fmaf_rn(o[tile / 16][tile % 16 * 4 + i], ending.factor[i / 2], bit_cast<float>(given[i]));
  }

  const Results<Policy>& results_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int group_;
};

}  // namespace mla::sm90
