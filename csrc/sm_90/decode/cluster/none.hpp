// The cluster modes. Each is a type with the hooks of ClusterMode, and a parameter of DecodePolicy:
//   ClusterNone        no cluster: every CTA for itself
//   ClusterReduceO     two KV splits of a sequence; each CTA keeps half of the columns of O and sends the other half
//   ClusterReduceFour  four KV splits of a sequence; each CTA keeps a quarter of the columns of O
//   ClusterReduceLast  two SM parts of a plan; they end with the same sequence, and reduce these two work tiles alone
//   ClusterExchangeP   two KV splits of a sequence; each CTA sends its P and computes half of the columns of both
//   ClusterShareKv     two row tiles of a sequence; what one CTA brings of their keys comes to both
//   ClusterShareAndReduce  four CTAs, of two row tiles and two KV splits: ClusterShareKv and ClusterReduceO at once
#pragma once

#include "sm_90/decode/shared_storage.hpp"
#include "sm_90/ptx/dsmem.hpp"
#include "sm_90/ptx/mbarrier.hpp"

namespace mla::sm_90 {

// The hooks as a CTA without a cluster has them; the other kinds replace those in which they differ.
struct ClusterMode {
  static constexpr bool SHARES_KV = false;
  static constexpr bool REDUCES_O = false;
  static constexpr bool EXCHANGES_P = false;
  static constexpr bool REDUCES_FOUR = false;
  static constexpr bool MERGES_SPLITS = false;  // CTAs merge their KV splits; each has one work tile, or none
  static constexpr int SPLITS = 2;              // that are merged
  static constexpr int SPLITS_APART = 1;        // how far apart in the cluster the numbers of two that merge first are
  static constexpr bool MERGES_LAST = false;    // two CTAs merge their last work tiles where a plan lets them
  static constexpr int STAGES = 5;              // of the KV ring, unless the policy says otherwise
  static constexpr int PEER_STAGES = 0;         // of the ring of the peer's keys
  static constexpr int KV_EMPTY_ARRIVALS = 256;  // the PV warpgroups, which read a stage last
  static constexpr int P_EMPTY_ARRIVALS = 256;
  // The epilogue writes a piece to shared memory only after the stores of the piece before: earlier would take
  // registers that CTAs of a cluster lack, and what the peer sends may still be on its way.
  static constexpr bool LATE_EPILOGUE = false;

  template <class Traits>
  using Storage = NoStorage;

  // Initialises the mbarriers of `Storage`; called by one thread.
  template <class Traits>
  MLA_DEVICE static void init_mbarriers(const Mbarriers<Traits>&) {}

  // Before any role begins: every mbarrier of this CTA, and of a peer, is initialised.
  MLA_DEVICE static void sync() { block_sync(); }

  // Which half of its columns a PV warpgroup's accumulator begins with, and the first column that the warpgroup stores.
  MLA_DEVICE static int first_half(int) { return 0; }
  template <class Traits>
  MLA_DEVICE static int first_stored_column(int group) {
    return group * Traits::WARPGROUP_COLUMNS;
  }

  // The number of a CTA among the two that share keys.
  MLA_DEVICE static uint32_t sharing_rank() { return cluster_rank(); }

  // A consumer warp, converged, releases a buffer that producers of the peer write, too.
  MLA_DEVICE static void release_at_peer(uint32_t) {}
};

template <int PATTERN_BYTES>
struct SentinelFillStorage;  // sentinel_fill.hpp

template <bool, class Yes, class>
struct SelectStorage {
  using Type = Yes;
};
template <class Yes, class No>
struct SelectStorage<false, Yes, No> {
  using Type = No;
};

struct ClusterNone : ClusterMode {
  template <class Traits>
  using Storage = typename SelectStorage<Traits::STREAMABLE, SentinelFillStorage<4096>, NoStorage>::Type;

  template <class Traits>
  MLA_DEVICE static uint32_t sentinel_fill(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(0);
  }
};

// This lane, and its converged warp, is done with what a barrier guards: a stage that the producer may fill again. A
// peer that fills it, too, gets one arrival of the warp, and gets it first, because its way is longer.
template <class Traits>
MLA_DEVICE void consumer_release(uint32_t barrier) {
  Traits::Cluster::release_at_peer(barrier);
  mbarrier_arrive(barrier);
}

// Zeros the first COLUMNS values of keys first..end - 1 of a stage; called by a whole warpgroup.
template <class Traits, int COLUMNS>
MLA_DEVICE void clear_keys(uint32_t stage, int first, int end) {
  constexpr int PIECES = COLUMNS / 8;  // of 16 bytes
  for (int i = first * PIECES + warpgroup_thread(); i < end * PIECES; i += 128) {
    const uint32_t to = stage + i % PIECES / 8 * Traits::BLOCK_BYTES + i / PIECES * 128 + i % 8 * 16;
    st_shared_v4(to, 0, 0, 0, 0);
  }
  fence_proxy_async();
}

}  // namespace mla::sm_90
