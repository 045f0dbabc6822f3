// ClusterExchangeP: the two CTAs of a cluster each attend to one KV split of a sequence, and each computes one half of
// the columns of O for both.
//
// Each CTA computes S and P of its own split and sends every P to the peer. One of its PV warpgroups multiplies its own
// P, the other the peer's, both with this CTA's half of the columns. At the end the two warpgroups merge within the
// CTA: each keeps half of what it has and hands the other half over.
#pragma once

#include "sm_90/decode/cluster/pair_output.hpp"
#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/decode/sentinel_fill.hpp"
#include "sm_90/decode/tile_scheduler.hpp"

namespace mla::sm_90 {

template <class Traits>
class ExchangeP;

struct ClusterExchangeP : ClusterPair {
  static constexpr bool EXCHANGES_P = true;
  static constexpr int STAGES = 4;
  static constexpr int PEER_STAGES = 2;
  static constexpr int KV_EMPTY_ARRIVALS = 128;  // the PV warpgroup of this CTA's P
  // The same warpgroup, the warps of the peer's that read the copy, and the warp that sends it.
  static constexpr int P_EMPTY_ARRIVALS = 128 + 4 + 32;
  static constexpr int CHUNKS = 4;  // of columns, in which one PV warpgroup hands half of its O to the other
  static constexpr int P_STAGES = 2;

  struct Mailbox {
    PairStorage pair;
    uint64_t p_written[P_STAGES];          // a P of this CTA can be sent
    uint64_t peer_kv_full[PEER_STAGES];    // the ring of the peer's keys
    uint64_t peer_kv_empty[PEER_STAGES];
    uint64_t swap_full[2][CHUNKS];  // a chunk that a PV warpgroup hands to the other is written
    SentinelFillStorage<WIDEST_HEAD_DIM_V / 2 * 4> fill;
  };
  template <class Traits>
  using Storage = Mailbox;

  // What a PV warpgroup keeps comes first: of this CTA's half of all columns, the half of its own number.
  MLA_DEVICE static int first_half(int group) { return group; }
  template <class Traits>
  MLA_DEVICE static int first_stored_column(int group) {
    return static_cast<int>(cluster_rank()) * Traits::WARPGROUP_COLUMNS + group * Traits::STORED_COLUMNS;
  }

  template <class Traits>
  MLA_DEVICE static uint32_t p_written(const Mbarriers<Traits>& barriers, int stage) {
    return at(barriers, __builtin_offsetof(Mailbox, p_written), stage);
  }
  template <class Traits>
  MLA_DEVICE static uint32_t peer_kv_full(const Mbarriers<Traits>& barriers, int stage) {
    return at(barriers, __builtin_offsetof(Mailbox, peer_kv_full), stage);
  }
  template <class Traits>
  MLA_DEVICE static uint32_t peer_kv_empty(const Mbarriers<Traits>& barriers, int stage) {
    return at(barriers, __builtin_offsetof(Mailbox, peer_kv_empty), stage);
  }
  template <class Traits>
  MLA_DEVICE static uint32_t swap_full(const Mbarriers<Traits>& barriers, int group, int chunk) {
    return at(barriers, __builtin_offsetof(Mailbox, swap_full), group * CHUNKS + chunk);
  }
  template <class Traits>
  MLA_DEVICE static uint32_t sentinel_fill(const Mbarriers<Traits>& barriers) {
    return barriers.in_cluster(__builtin_offsetof(Mailbox, fill));
  }

  template <class Traits>
  MLA_DEVICE static void init_mbarriers(const Mbarriers<Traits>& barriers) {
    static_assert(P_STAGES == Traits::P_STAGES);
    ClusterPair::init_mbarriers(barriers);
    for (int stage = 0; stage < P_STAGES; ++stage) {
      mbarrier_init(p_written(barriers, stage), 128);          // the QK warpgroup
      mbarrier_init(barriers.p_full(P_STAGES + stage), 1);  // who waits for the peer's P
    }
    for (int stage = 0; stage < PEER_STAGES; ++stage) {
      mbarrier_init(peer_kv_full(barriers, stage), 1);     // the producer
      mbarrier_init(peer_kv_empty(barriers, stage), 128);  // the PV warpgroup of the peer's P
    }
    for (int chunk = 0; chunk < 2 * CHUNKS; ++chunk) mbarrier_init(swap_full(barriers, 0, chunk), 128);
  }

  // The peer's split of the sequence.
  MLA_DEVICE static EvenSplit<false> peer_split(const DecodeTmaParams& params, int sequence, int length) {
    const int number = (static_cast<int>(blockIdx.y) - sequence * params.num_splits) ^ 1;
    return {params, number, length, first_read(params, sequence, length), BLOCK_N};
  }
  // How many keys of its first stage lie before the window.
  MLA_DEVICE static int peer_skipped(const DecodeTmaParams& params) {
    const int sequence = divided(blockIdx.y, params.splits_reciprocal, params.splits_shift);
    return peer_split(params, sequence, ld_global(params.seq_lens + sequence)).first % BLOCK_N;
  }

  // A producer warp: sends every P stage that the QK warpgroup writes to the peer's stage of the same number. QK writes
  // a stage again only when both CTAs are done with it.
  template <class Traits>
  MLA_DEVICE static void send_p(uint32_t shared) {
    const Mbarriers<Traits> barriers(shared);
    PipelineState<P_STAGES> stages;
    for (int command = 0; !(command & (LAST | FINISH | STOP)); stages.next()) {
      const uint32_t from = shared + SharedStorage<Traits>::P + stages.stage * sizeof(PStage);
      const uint32_t to = from + P_STAGES * sizeof(PStage);
      const uint32_t there = map_to_peer(to), full = map_to_peer(barriers.p_full(P_STAGES + stages.stage));
      mbarrier_wait(p_written(barriers, stages.stage), stages.parity);
      fence_proxy_async();
      if (warpgroup_thread() % 32 == 0) peer_copy(there, from, sizeof(PStage), full);
      __syncwarp();
      command = warp_uniform(ld_shared<int>(from + SharedStorage<Traits>::P_COMMAND));
      mbarrier_arrive(barriers.p_empty(stages.stage));  // the command is read; PV of both CTAs tell of the rest
    }
  }

  // The end of a PV warpgroup's only work tile. There is one path for each case: where they met, the compiler would
  // wait for the last product.
  template <class Pv>
  MLA_DEVICE static void finish_tile(Pv& pv, int command) {
    if (command & MULTIPLY) {
      OutputTarget target;
      pv.multiply(command, [&] { target = find_only_rows(pv.params_, pv.epilogue_); });
      merge(pv, target);
    } else {
      OutputTarget target = find_only_rows(pv.params_, pv.epilogue_);
      merge(pv, target);
    }
  }

 private:
  // The address of an mbarrier, numbered from the first of these: the compiler folds addresses of this form best.
  template <class Traits>
  MLA_DEVICE static uint32_t at(const Mbarriers<Traits>& barriers, int offset, int number) {
    constexpr int FIRST = __builtin_offsetof(Mailbox, p_written);
    return barriers.in_cluster(FIRST) + 8 * ((offset - FIRST) / 8 + number);
  }

  template <class Pv>
  MLA_DEVICE static void merge(Pv& pv, OutputTarget& target) {
    pv.wait_for_fill();
    const ExchangeP<typename Pv::Traits> exchange(pv.epilogue_, pv.shared_, pv.group_);
    exchange.find_scales(target);
    pv.wait_for_product();
    pv.release_p();
    exchange.merge(pv.o_, target);
  }
};

// The merge as each PV thread does it. What a warpgroup hands over lies where its keys were; results go to memory by
// way of this CTA's own ring.
template <class Traits>
class ExchangeP {
  static constexpr int CHUNKS = ClusterExchangeP::CHUNKS;
  static constexpr int TILES = Traits::STORED_COLUMNS / 8;
  static constexpr int CHUNK_TILES = TILES / CHUNKS;
  static constexpr int SWAP_BYTES = BLOCK_M * Traits::STORED_COLUMNS * 4;
  static constexpr int BUFFERS = SharedStorage<Traits>::KV + SWAP_BYTES;
  static_assert(BUFFERS + 8 * Epilogue<Traits>::BUFFER_BYTES <= Traits::STAGES * Traits::STAGE_BYTES);
  static_assert(SWAP_BYTES <= Traits::PEER_STAGES * Traits::PEER_STAGE_BYTES);

 public:
  // Group 0 has O of this CTA's P, group 1 of the peer's.
  MLA_DEVICE ExchangeP(const Epilogue<Traits>& epilogue, uint32_t shared, int group)
      : epilogue_(epilogue), barriers_(shared), shared_(shared), group_(group) {}

  // Waits for the scales of this thread's rows, and writes the lse to memory.
  MLA_DEVICE void find_scales(OutputTarget& target) const {
    mbarrier_wait(ClusterPair::scales_ready(barriers_), 0);
    load_merge_scales<Traits>(shared_, group_, target.factor);
    if (group_ == 0 && cluster_rank() == 0) epilogue_.store_lse(target, shared_ + PairOffsets<Traits>::LSE);
  }

  // `o` holds the columns that this warpgroup keeps, then those that it hands over.
  MLA_DEVICE void merge(PairO& o, const OutputTarget& target) const {
    clear_no_contribution(o, target.factor);
    named_barrier_sync<128>(PV_GROUP_BARRIER + group_);  // the other warps read these keys, too
    publish_o(o, target, 0);
    epilogue_.store(
        shared_ + BUFFERS + (group_ * 4 + warpgroup_thread() / 32) * Epilogue<Traits>::BUFFER_BYTES, target,
        [&](int tile, float (&four)[4]) { merged_tile(o, tile, target, four); });
  }

 private:
  // Where this thread's part of a tile lies in what a group hands over: a tile is 2,048 bytes, 16 of each thread.
  MLA_DEVICE uint32_t tile_address(int group, int tile) const {
    return shared_ + (group == 0 ? SharedStorage<Traits>::KV : SharedStorage<Traits>::PEER_KV) + tile * 2048 +
           warpgroup_thread() * 16;
  }

  MLA_DEVICE void publish_o(const PairO& o, const OutputTarget& target, int chunk) const {
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; ++i) {
      const int tile = chunk * CHUNK_TILES + i;
      float four[4];
      scaled_tile(o, TILES + tile, target.factor, four);
      st_shared_v4(tile_address(group_, tile), four);
    }
    mbarrier_arrive(ClusterExchangeP::swap_full(barriers_, group_, chunk));
  }

  // One tile that is kept, of both splits. Before the first tile of a chunk, the next chunk is handed over.
  MLA_DEVICE void merged_tile(const PairO& o, int tile, const OutputTarget& target, float (&four)[4]) const {
    if (tile % CHUNK_TILES == 0) {
      const int chunk = tile / CHUNK_TILES;
      if (chunk + 1 < CHUNKS) publish_o(o, target, chunk + 1);
      mbarrier_wait(ClusterExchangeP::swap_full(barriers_, group_ ^ 1, chunk), 0);
    }
    uint32_t others[4];
    ld_shared_v4(tile_address(group_ ^ 1, tile), others);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four[i] = __fmaf_rn(o[tile / 16][tile % 16 * 4 + i], target.factor[i / 2], bit_cast<float>(others[i]));
  }

  const Epilogue<Traits>& epilogue_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  int group_;
};

}  // namespace mla::sm_90
