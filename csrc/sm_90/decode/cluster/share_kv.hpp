// ClusterShareKv: the two CTAs of a cluster hold two row tiles of a sequence, of which both read all keys. Either each
// loads every other KV stage for both (producer_tma.hpp), or it dequantises half of each for both
// (sparse_decode/producer_dequant.hpp). Their rings advance in step.
#pragma once

#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/ptx/dsmem.hpp"

namespace mla::sm_90 {

struct ClusterShareKv : ClusterMode {
  static constexpr bool SHARES_KV = true;
  static constexpr bool LATE_EPILOGUE = true;
  static constexpr int KV_EMPTY_ARRIVALS = 256 + 8;  // the PV warpgroups, and the peer's PV warps

  struct Mailbox {
    uint64_t keys_copied[2];  // the peer has all keys of a work tile, every other one
  };
  template <class Traits>
  using Storage = typename SelectStorage<Traits::SENDS_KEYS, Mailbox, NoStorage>::Type;

  template <class Traits>
  MLA_DEVICE static void init_mbarriers(const Mbarriers<Traits>& barriers) {
    if constexpr (Traits::SENDS_KEYS)
      for (int number = 0; number < 2; ++number) mbarrier_init(barriers.in_cluster(8 * number), 1);
  }

  MLA_DEVICE static void sync() { cluster_sync(); }
  MLA_DEVICE static void release_at_peer(uint32_t barrier) {
    peer_mbarrier_arrive(map_to_peer(barrier), warpgroup_thread() % 32 == 0);
  }
};

// Results leave through the stage that was read last. Where keys are sent, half of that stage has been copied to the peer
// from there, and the copy may be late. So QK tells the peer when it has a work tile's last keys, and waits for the peer's
// word before it publishes that the tile is finished. Two mbarriers take turns, because a peer may be one tile ahead.
template <class Traits>
class KeysCopied {
 public:
  MLA_DEVICE void tell_peer(const Mbarriers<Traits>& barriers) const {
    peer_mbarrier_arrive(map_to_peer(barriers.in_cluster(8 * (tiles_ % 2))), warpgroup_thread() == 0);
  }
  MLA_DEVICE void wait(const Mbarriers<Traits>& barriers) {
    static_assert(Traits::STAGES < 2 * 3, "a tile takes three stages at least, so a peer is never two tiles ahead");
    mbarrier_wait(barriers.in_cluster(8 * (tiles_ % 2)), tiles_ / 2 % 2);
    ++tiles_;
  }

 private:
  uint32_t tiles_ = 0;  // that have had keys
};

}  // namespace mla::sm_90
