// ClusterReduceO: the two CTAs of a cluster each attend to one KV split of a sequence, and merge O before anything goes
// to memory.
//
// Each CTA keeps one half of the columns and sends the other to its peer, 64 rows x 256 columns of fp32. So a PV
// warpgroup either sends or merges, and what one thread sends, the same thread of the peer receives.
#pragma once

#include "sm_90/decode/cluster/pair_output.hpp"
#include "sm_90/decode/named_barriers.hpp"

namespace mla::sm_90 {

template <class Traits>
class ReduceO;

struct ClusterReduceO : ClusterPair {
  static constexpr bool REDUCES_O = true;
  static constexpr int CHUNKS = 4;  // of columns, in which half of O is sent
  static constexpr int SENT_BYTES = BLOCK_M * (WIDEST_HEAD_DIM_V / 2) * 4;
  static constexpr int CHUNK_BYTES = SENT_BYTES / CHUNKS / 4;  // of one warp's rows

  struct Mailbox {
    PairStorage pair;
    uint64_t peer_ring_drained;  // the peer no longer reads its KV ring, which will hold what is sent
    uint64_t peer_copy_done;     // the peer has received all that this CTA sends
    uint64_t o_full[CHUNKS][4];  // a chunk of one warp's rows has arrived
  };
  template <class Traits>
  using Storage = Mailbox;

  template <class Traits>
  MLA_DEVICE static uint32_t peer_ring_drained(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, peer_ring_drained));
  }
  template <class Traits>
  MLA_DEVICE static uint32_t peer_copy_done(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, peer_copy_done));
  }
  template <class Traits>
  MLA_DEVICE static uint32_t o_full(const Mbarriers<Traits>& barriers, int warp, int chunk) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, o_full)) + 8 * (chunk * 4 + warp);
  }

  template <class Traits>
  MLA_DEVICE static void init_mbarriers(const Mbarriers<Traits>& barriers) {
    ClusterPair::init_mbarriers(barriers);
    mbarrier_init(peer_ring_drained(barriers), 8);  // the peer's PV warps
    mbarrier_init(peer_copy_done(barriers), 4);     // those of them that merge
    for (int warp = 0; warp < 4; ++warp)
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        mbarrier_init(o_full(barriers, warp, chunk), 1);
        mbarrier_expect_tx(o_full(barriers, warp, chunk), CHUNK_BYTES);
      }
  }

  // The end of a PV warpgroup's only work tile. Its rows are found early, when nothing waits for it.
  template <class Pv>
  MLA_DEVICE static void finish_tile(Pv& pv, int command) {
    const OutputTarget target = find_only_rows(pv.params_, pv.epilogue_);
    if (command & MULTIPLY) pv.multiply(command, [] {});
    pv.wait_for_product();
    ReduceO<typename Pv::Traits>(pv.params_, pv.shared_, pv.group_).merge(pv.o_, target);
  }
};

// The merge as each PV thread does it. Where the KV ring was, shared memory holds what the peer sends, what is sent to
// it, and the epilogue's buffers.
template <class Traits>
class ReduceO {
 protected:
  using Params = typename Traits::Params;
  static constexpr int raw_ring() {
    if constexpr (Traits::SELECTED)
      return Traits::RAW;
    else
      return SharedStorage<Traits>::RAW;
  }
  static constexpr int CHUNKS = ClusterReduceO::CHUNKS;
  static constexpr int APART = Traits::Cluster::SPLITS_APART;
  static constexpr int CHUNK_BYTES = ClusterReduceO::CHUNK_BYTES;
  static constexpr int RECEIVED = SharedStorage<Traits>::KV, SENT = RECEIVED + ClusterReduceO::SENT_BYTES;
  static constexpr int BEHIND = SENT + ClusterReduceO::SENT_BYTES, BUFFER_BYTES = 4 * Epilogue<Traits>::BUFFER_BYTES;
  static constexpr int RING_BYTES = Traits::STAGES * Traits::STAGE_BYTES;
  // Where the ring of values has no room for the buffers, that of keys as they are stored is done with, too.
  static constexpr bool IN_RAW = BEHIND + BUFFER_BYTES > RING_BYTES;
  static constexpr int BUFFERS = IN_RAW ? raw_ring() : BEHIND;
  static constexpr int CHUNK_TILES = Traits::WARPGROUP_COLUMNS / 8 / CHUNKS;
  static_assert(BEHIND <= RING_BYTES);

 public:
  MLA_DEVICE ReduceO(const Params& params, uint32_t shared, int side)
      : params_(params), barriers_(shared), shared_(shared), side_(side) {}

  // On return the CTA may end.
  MLA_DEVICE void merge(PairO& o, const OutputTarget& target) const {
    report_ring_drained();
    if (side_ != static_cast<int>(cluster_rank()) / APART) {
      send_all(o, target);
    } else {
      named_barrier_arrive<PV_BARRIER, 256>();
      float peer[2];
      scale(o, target, peer, side_ == 0);
      if (has_rows(target))
        Epilogue<Traits>(params_, side_ * Traits::WARPGROUP_COLUMNS)
            .store(shared_ + BUFFERS + warpgroup_thread() / 32 * Epilogue<Traits>::BUFFER_BYTES, target,
                   [&](int tile, float (&four)[4]) { merged_tile(o, tile, peer, four); });
      else
        report_copy_done();
    }
  }

 protected:
  // Tells the peer that this warp, which is converged, is done with the ring.
  MLA_DEVICE void report_ring_drained() const {
    peer_mbarrier_arrive(map_to_peer<APART>(ClusterReduceO::peer_ring_drained(barriers_)), warpgroup_thread() % 32 == 0);
  }

  // Whether any of this warp's rows has a query; the answer is the same in both CTAs.
  MLA_DEVICE static bool has_rows(const OutputTarget& target) { return __any_sync(~0u, target.offset[0] != NO_ROW); }

  // Where this lane's part of a tile lies in what is sent: tiles lie chunk by chunk, and a chunk warp by warp. A warp's
  // part of a tile is 512 bytes, 16 of each lane.
  MLA_DEVICE static uint32_t tile_offset(int tile) {
    return chunk_offset(tile / CHUNK_TILES) + tile % CHUNK_TILES * 512 + warpgroup_thread() % 32 * 16;
  }
  MLA_DEVICE static uint32_t chunk_offset(int chunk) { return (chunk * 4 + warpgroup_thread() / 32) * CHUNK_BYTES; }

  // Sends all that the peer keeps, and waits until it has it.
  MLA_DEVICE void send_all(const PairO& o, const OutputTarget& target) const {
    named_barrier_sync<PV_BARRIER, 256>();
    if (has_rows(target)) send(o);
    mbarrier_wait(ClusterReduceO::peer_ring_drained(barriers_), 0);
    mbarrier_wait(ClusterReduceO::peer_copy_done(barriers_), 0);
  }

  // O goes through this CTA's shared memory and the copy engine, which takes a third less time than remote stores.
  MLA_DEVICE void send(const PairO& o) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
      for (int i = 0; i < CHUNK_TILES; ++i) {
        const int tile = chunk * CHUNK_TILES + i;
        const float* four = &o[tile / 16][tile % 16 * 4];
        st_shared_v4(shared_ + SENT + tile_offset(tile), {four[0], four[1], four[2], four[3]});
      }
      fence_proxy_async();
      if (chunk == 0) mbarrier_wait(ClusterReduceO::peer_ring_drained(barriers_), 0);
      __syncwarp();
      const uint32_t from = shared_ + chunk_offset(chunk);
      if (warpgroup_thread() % 32 == 0)
        peer_copy(map_to_peer<APART>(from + RECEIVED), from + SENT, CHUNK_BYTES, map_to_peer<APART>(o_full(chunk)));
    }
  }

  MLA_DEVICE uint32_t o_full(int chunk) const {
    return ClusterReduceO::o_full(barriers_, warpgroup_thread() / 32, chunk);
  }

  // Tells the peer that all that its warp sent has arrived, so that it may end.
  MLA_DEVICE void report_copy_done() const {
    peer_mbarrier_arrive(map_to_peer<APART>(ClusterReduceO::peer_copy_done(barriers_)), warpgroup_thread() % 32 == 0);
  }

  // Scales this CTA's O, and writes the rows' lse to memory where it `stores_lse`; `peer` becomes the scales of the
  // peer's O.
  MLA_DEVICE void scale(PairO& o, const OutputTarget& target, float (&peer)[2], bool stores_lse) const {
    float own[2];
    mbarrier_wait(ClusterPair::scales_ready(barriers_), 0);
    if (stores_lse) Epilogue<Traits>(params_, 0).store_lse(target, shared_ + PairOffsets<Traits>::LSE);
    load_merge_scales<Traits>(shared_, 0, own);
    load_merge_scales<Traits>(shared_, 1, peer);
    clear_no_contribution(o, own);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      o[0][i] *= own[i / 2 % 2];
      o[1][i] *= own[i / 2 % 2];
    }
  }

  // One tile of both splits.
  MLA_DEVICE void merged_tile(const PairO& o, int tile, const float (&peer)[2], float (&four)[4]) const {
    if (tile % CHUNK_TILES == 0) {
      mbarrier_wait(o_full(tile / CHUNK_TILES), 0);
      if (tile / CHUNK_TILES == CHUNKS - 1) report_copy_done();
    }
    uint32_t others[4];
    ld_shared_v4(shared_ + RECEIVED + tile_offset(tile), others);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = is_no_contribution(peer[i / 2]) ? 0.0f : bit_cast<float>(others[i]);
      four[i] = __fmaf_rn(other, peer[i / 2], o[tile / 16][tile % 16 * 4 + i]);
    }
  }

  const Params& params_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  int side_;
};

}  // namespace mla::sm_90
