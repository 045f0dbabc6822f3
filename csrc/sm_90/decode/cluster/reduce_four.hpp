// ClusterReduceFour: the four CTAs of a cluster each attend to one KV split of a sequence, and merge O in two steps.
//
// First two CTAs that are two apart do what ClusterReduceO does: each keeps half of the columns, of two splits. Then each
// sends half of these sums to its neighbour, the CTA one apart, which has those of the other two splits, and keeps a
// quarter of the columns, 64 rows x 128 of fp32. What is sent then comes first in O, so that it is on its way while the
// rest is merged.
#pragma once

#include "sm_90/decode/cluster/reduce_o.hpp"

namespace mla::sm_90 {

template <class Traits>
class ReduceFour;

struct ClusterReduceFour : ClusterReduceO {
  static constexpr bool REDUCES_FOUR = true;
  static constexpr int SPLITS = 4;
  static constexpr int SPLITS_APART = 2;
  static constexpr int SUM_CHUNKS = CHUNKS / 2;  // that the neighbour gets

  struct Mailbox {
    ClusterReduceO::Mailbox pair;
    uint64_t neighbour_stats_full;     // max and sum of the neighbour's two splits have arrived
    uint64_t neighbour_copy_done;      // the neighbour has received all that this CTA sends
    uint64_t neighbour_ring_drained;   // and no longer reads its KV ring, where that holds what is sent
    uint64_t sum_full[SUM_CHUNKS][4];  // a chunk of one warp's rows has arrived
  };
  template <class Traits>
  using Storage = Mailbox;

  // A CTA keeps the second half of what it holds of its warpgroup's columns, as it sends the first.
  MLA_DEVICE static int first_half(int) { return static_cast<int>(cluster_rank()) % 2 ^ 1; }
  template <class Traits>
  MLA_DEVICE static int first_stored_column(int group) {
    return group * Traits::WARPGROUP_COLUMNS + static_cast<int>(cluster_rank()) % 2 * Traits::STORED_COLUMNS;
  }

  template <class Traits>
  MLA_DEVICE static uint32_t neighbour_stats_full(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, neighbour_stats_full));
  }
  template <class Traits>
  MLA_DEVICE static uint32_t neighbour_copy_done(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, neighbour_copy_done));
  }
  template <class Traits>
  MLA_DEVICE static uint32_t neighbour_ring_drained(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, neighbour_ring_drained));
  }
  template <class Traits>
  MLA_DEVICE static uint32_t sum_full(const Mbarriers<Traits>& barriers, int warp, int chunk) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, sum_full)) + 8 * (chunk * 4 + warp);
  }

  template <class Traits>
  MLA_DEVICE static void init_mbarriers(const Mbarriers<Traits>& barriers) {
    ClusterReduceO::init_mbarriers(barriers);
    mbarrier_init(neighbour_stats_full(barriers), 1);
    mbarrier_expect_tx(neighbour_stats_full(barriers), 2 * BLOCK_M * 4);
    mbarrier_init(neighbour_copy_done(barriers), 4);     // the neighbour's PV warps that merge
    mbarrier_init(neighbour_ring_drained(barriers), 8);  // all of them
    for (int warp = 0; warp < 4; ++warp)
      for (int chunk = 0; chunk < SUM_CHUNKS; ++chunk) {
        mbarrier_init(sum_full(barriers, warp, chunk), 1);
        mbarrier_expect_tx(sum_full(barriers, warp, chunk), CHUNK_BYTES);
      }
  }

  // Makes `rows`, of two splits, those of all four: the neighbour's come to where this thread writes the rows' scales
  // afterwards, `scales_at`.
  template <class Traits>
  MLA_DEVICE static void merge_neighbour(const Mbarriers<Traits>& barriers, uint32_t scales_at, MergedRow (&rows)[2],
                                         bool leads) {
    const float max[2] = {rows[0].max, rows[1].max}, sum[2] = {rows[0].sum, rows[1].sum};
    send_stats<1>(scales_at, neighbour_stats_full(barriers), max, sum, leads);
    mbarrier_wait(neighbour_stats_full(barriers), 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = scales_at + half * 32;
      const MergedRow all(max[half], sum[half], ld_shared<float>(at), ld_shared<float>(at + BLOCK_M * 4));
      MergedRow& row = rows[half];
      row.own *= all.own;
      row.own_part *= all.own;
      row.peer *= all.own;
      row.peer_part *= all.own;
      row.max = all.max;
      row.sum = all.sum;
    }
  }

  template <class Pv>
  MLA_DEVICE static void finish_tile(Pv& pv, int command) {
    const OutputTarget target = find_only_rows(pv.params_, pv.epilogue_);
    if (command & MULTIPLY) pv.multiply(command, [] {});
    pv.wait_for_product();
    ReduceFour<typename Pv::Traits>(pv.params_, pv.shared_, pv.group_).merge(pv.o_, target, pv.epilogue_);
  }
};

// The merge as each PV thread does it. A lane writes sums over what it has received, and they are sent from there.
template <class Traits>
class ReduceFour : ReduceO<Traits> {
  using Base = ReduceO<Traits>;
  using Base::barriers_, Base::params_, Base::shared_, Base::side_;
  static constexpr int SUM_CHUNKS = ClusterReduceFour::SUM_CHUNKS;
  static constexpr int SUM_TILES = SUM_CHUNKS * Base::CHUNK_TILES;
  static constexpr int SUM_BYTES = SUM_CHUNKS * 4 * Base::CHUNK_BYTES;
  // Where the neighbour's arrive: in place of keys as they are stored or, where there are none, of the ring's last.
  static constexpr bool SUMS_IN_RING = Traits::RAW_BYTES == 0;
  static constexpr int SUMS = SUMS_IN_RING ? Base::BEHIND : Traits::RAW;
  static constexpr int BUFFERS = Base::RECEIVED + SUM_BYTES;  // over the rest of what was received
  static_assert(SUMS_IN_RING ? SUMS + SUM_BYTES <= Base::RING_BYTES : SUM_BYTES <= Traits::PRODUCER_WARPS * Traits::RAW_BYTES);
  static_assert(SUMS % 16 == 0 && Epilogue<Traits>::BUFFER_BYTES <= SUM_CHUNKS * Base::CHUNK_BYTES);

 public:
  using Base::Base;

  // On return the CTA may end.
  MLA_DEVICE void merge(PairO& o, const OutputTarget& target, const Epilogue<Traits>& epilogue) const {
    this->report_ring_drained();
    if constexpr (SUMS_IN_RING)
      peer_mbarrier_arrive(map_to_peer<1>(ClusterReduceFour::neighbour_ring_drained(barriers_)),
                           warpgroup_thread() % 32 == 0);
    if (side_ != static_cast<int>(cluster_rank()) / 2) return this->send_all(o, target);
    named_barrier_arrive<PV_BARRIER, 256>();
    float peer[2];
    this->scale(o, target, peer, cluster_rank() == 0);
    if (Base::has_rows(target)) {
      send_sums(o, peer);
#pragma unroll
      for (int i = 0; i < SUM_TILES; ++i) {
        float four[4];
        this->merged_tile(o, SUM_TILES + i, peer, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) o[1][i * 4 + j] = four[j];
      }
      __syncwarp();  // all lanes are done with what the buffers take the place of
      epilogue.store(shared_ + BUFFERS + warpgroup_thread() / 32 * Epilogue<Traits>::BUFFER_BYTES, target,
                     [&](int tile, float (&four)[4]) { tile_of_all(o, tile, four); });
    } else {
      this->report_copy_done();
      report_sums_received();
    }
    mbarrier_wait(ClusterReduceFour::neighbour_copy_done(barriers_), 0);
  }

 private:
  // Merges what the neighbour keeps, and sends it to where the neighbour's keys were. Of those as they are stored its
  // statistics, for which `scale` has waited, say that it has all their scores.
  MLA_DEVICE void send_sums(const PairO& o, const float (&peer)[2]) const {
#pragma unroll
    for (int chunk = 0; chunk < SUM_CHUNKS; ++chunk) {
#pragma unroll
      for (int i = 0; i < Base::CHUNK_TILES; ++i) {
        const int tile = chunk * Base::CHUNK_TILES + i;
        float four[4];
        this->merged_tile(o, tile, peer, four);
        st_shared_v4(shared_ + Base::RECEIVED + Base::tile_offset(tile), {four[0], four[1], four[2], four[3]});
      }
      fence_proxy_async();
      if constexpr (SUMS_IN_RING)
        if (chunk == 0) mbarrier_wait(ClusterReduceFour::neighbour_ring_drained(barriers_), 0);
      __syncwarp();
      const uint32_t from = shared_ + Base::chunk_offset(chunk);
      if (warpgroup_thread() % 32 == 0)
        peer_copy(map_to_peer<1>(from + SUMS), from + Base::RECEIVED, Base::CHUNK_BYTES, map_to_peer<1>(sum_full(chunk)));
    }
  }

  MLA_DEVICE uint32_t sum_full(int chunk) const {
    return ClusterReduceFour::sum_full(barriers_, warpgroup_thread() / 32, chunk);
  }

  // Tells the neighbour that all that its warp sent has arrived, so that it may end.
  MLA_DEVICE void report_sums_received() const {
    peer_mbarrier_arrive(map_to_peer<1>(ClusterReduceFour::neighbour_copy_done(barriers_)), warpgroup_thread() % 32 == 0);
  }

  // One tile of all four splits.
  MLA_DEVICE void tile_of_all(const PairO& o, int tile, float (&four)[4]) const {
    if (tile % Base::CHUNK_TILES == 0) {
      mbarrier_wait(sum_full(tile / Base::CHUNK_TILES), 0);
      if (tile / Base::CHUNK_TILES == SUM_CHUNKS - 1) report_sums_received();
    }
    uint32_t others[4];
    ld_shared_v4(shared_ + SUMS + Base::tile_offset(tile), others);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = o[1][tile * 4 + i] + bit_cast<float>(others[i]);
  }
};

}  // namespace mla::sm_90
