// Two cuts of a sequence, merged by the two blocks of a cluster that computed them, before anything goes to memory.
//
// Each block keeps one side of the columns and sends the other's to its peer, 64 rows x 256 columns of fp32. So a
// values warpgroup either sends or merges, and what one thread sends, the same thread of the other block takes.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/results.hpp"
#include "sm_90/two_cuts.hpp"

namespace mla::sm90 {

// The merge as each values thread does it. In shared memory, where the ring of stages was: what the peer sends, what it
// is sent, and room for the results.
template <class Policy>
class Together {
  using Params = typename Policy::Params;
  static constexpr int TAKEN = Policy::KV_OFFSET, GIVEN = TAKEN + SENT_BYTES, ROOM = GIVEN + SENT_BYTES;
  static constexpr int CHUNK_TILES = VALUE_COLUMNS / 8 / SENT_CHUNKS;
  static_assert(ROOM + 4 * Results<Policy>::ROOM_BYTES <= Policy::STAGES * Policy::STAGE_BYTES);

 public:
  MLA_DEVICE Together(const Params& params, uint32_t shared, int side)
      : params_(params), barriers_(shared), shared_(shared), side_(side) {}

  // On return a block may end.
  MLA_DEVICE void merge(Products& o, const Ending& ending) const {
    peer_arrive(at_peer(barriers_.ring_left()), group_thread() % 32 == 0);  // this warp is done with it, and has met
    if (side_ != static_cast<int>(cluster_rank())) {
      asm volatile("bar.sync %0, 256;" ::"n"(VALUES_BARRIER) : "memory");
      if (has_rows(ending)) send(o);
      barrier_wait(barriers_.ring_left(), 0);
      barrier_wait(barriers_.taken(), 0);
    } else {
      asm volatile("bar.arrive %0, 256;" ::"n"(VALUES_BARRIER) : "memory");
      float peer[2];
      weigh(o, ending, peer);
      if (has_rows(ending))
        Results<Policy>(params_, side_ * VALUE_COLUMNS)
            .store(shared_ + ROOM + group_thread() / 32 * Results<Policy>::ROOM_BYTES, ending,
                   [&](int tile, float (&four)[4]) { both(o, tile, peer, four); });
      else
        tell_taken();
    }
  }

 private:
  // Whether any of this warp's rows has a query: the same in both blocks.
  MLA_DEVICE static bool has_rows(const Ending& ending) { return __any_sync(~0u, ending.offset[0] != NO_ROW); }

  // Where this lane's part of a tile lies in what is sent: tiles lie chunk by chunk, and a chunk warp by warp.
  MLA_DEVICE static uint32_t place(int tile) {
    return place_of_chunk(tile / CHUNK_TILES) + tile % CHUNK_TILES * 512 + group_thread() % 32 * 16;
  }
  MLA_DEVICE static uint32_t place_of_chunk(int chunk) { return (chunk * 4 + group_thread() / 32) * CHUNK_BYTES; }

  // Through this block's shared memory by the copy engine, which takes a third less time than stores to the peer's.
  MLA_DEVICE void send(const Products& o) const {
#pragma unroll
    for (int chunk = 0; chunk < SENT_CHUNKS; ++chunk) {
#pragma unroll
      for (int i = 0; i < CHUNK_TILES; ++i) {
        const int tile = chunk * CHUNK_TILES + i;
        const float* four = &o[tile / 16][tile % 16 * 4];
        store16(shared_ + GIVEN + place(tile), {four[0], four[1], four[2], four[3]});
      }
      fence_async();
      if (chunk == 0) barrier_wait(barriers_.ring_left(), 0);
      __syncwarp();
      const uint32_t from = shared_ + place_of_chunk(chunk);
      if (group_thread() % 32 == 0) peer_copy(at_peer(from + TAKEN), from + GIVEN, CHUNK_BYTES, at_peer(sent(chunk)));
    }
  }

  MLA_DEVICE uint32_t sent(int chunk) const { return barriers_.sent(group_thread() / 32, chunk); }

  // Tells the peer that all that its warp sent is here, so that it may end.
  MLA_DEVICE void tell_taken() const { peer_arrive(at_peer(barriers_.taken()), group_thread() % 32 == 0); }

  // What both cuts of this lane's rows count, and the rows' lse to memory.
  MLA_DEVICE void weigh(Products& o, const Ending& ending, float (&peer)[2]) const {
    float own[2];
    barrier_wait(barriers_.weighed(), 0);
    if (side_ == 0) Results<Policy>(params_, 0).store_lse(ending, shared_ + Policy::BOTH_LSE);
    load_weights<Policy>(shared_, 0, own);
    load_weights<Policy>(shared_, 1, peer);
    clear_nothing(o, own);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      o[0][i] *= own[i / 2 % 2];
      o[1][i] *= own[i / 2 % 2];
    }
  }

  // A tile of both cuts.
  MLA_DEVICE void both(const Products& o, int tile, const float (&peer)[2], float (&four)[4]) const {
    if (tile % CHUNK_TILES == 0) {
      barrier_wait(sent(tile / CHUNK_TILES), 0);
      if (tile / CHUNK_TILES == SENT_CHUNKS - 1) tell_taken();
    }
    uint32_t others[4];
    load16(shared_ + TAKEN + place(tile), others);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = is_nothing(peer[i / 2]) ? 0.0f : bit_cast<float>(others[i]);
      four[i] = __fmaf_rn(other, peer[i / 2], o[tile / 16][tile % 16 * 4 + i]);
    }
  }

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int side_;
};

}  // namespace mla::sm90
