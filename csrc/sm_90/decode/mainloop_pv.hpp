// The two PV warpgroups, which hold O: O = O * factor + P V, half of the columns each.
#pragma once

#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/decode/epilogue.hpp"
#include "sm_90/decode/fold.hpp"
#include "sm_90/decode/max_logits.hpp"
#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/ptx/dsmem.hpp"

namespace mla::sm_90 {

template <class Traits_, class Epilogue>
class PvMma {
 public:
  using Traits = Traits_;

 private:
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using Cluster = typename Traits::Cluster;
  using Storage = SharedStorage<Traits>;
  friend Cluster;  // its finish_tile
  static constexpr int COLUMNS = Traits::WARPGROUP_COLUMNS;
  using Accumulator = AccumulatorO<COLUMNS>;
  static constexpr int LAST_PRODUCT = sizeof(Accumulator) / sizeof(Accumulator{}[0]) - 1;  // 0 or 1
  static constexpr int VALUES = sizeof(Accumulator{}[0]) / sizeof(float);

 public:
  // Group 0 holds the first half of the columns, group 1 the others. With ClusterExchangeP both hold the CTA's half of the columns:
  // group 0 of this CTA's P, group 1 of the peer's.
  MLA_DEVICE PvMma(const Params& params, uint32_t shared, int group)
      : params_(params),
        barriers_(shared),
        shared_(shared),
        group_(group),
        epilogue_(params, Cluster::template first_stored_column<Traits>(group)) {}

  // Follows the QK warpgroup's commands, P stage by P stage. Each P V is waited for at once: the next P is published a
  // whole Q K^T later, and releasing a KV stage early is worth more than queueing a P V early.
  MLA_DEVICE void run() {
    for (;;) {
      int command = next_command();
      if (command & STOP) {
        if constexpr (Cluster::EXCHANGES_P) release_p();
        return;
      }
      // O is cleared for both cases. Otherwise the compiler takes its registers to be live since the last tile.
#pragma unroll
      for (int i = 0; i < VALUES; ++i) o_[0][i] = o_[LAST_PRODUCT][i] = 0.0f;
      if ((command & (MULTIPLY | Q_PASSED)) && !of_peer()) {
        kv_.next();
        kv_.next();
      }
      if constexpr (Cluster::MERGES_SPLITS) return Cluster::finish_tile(*this, command);
      if (command & MULTIPLY) {
        if constexpr (Traits::FOLDS) {
          multiply_splits(command);
          continue;
        }
        multiply(command, [] {});
        if constexpr (Cluster::MERGES_LAST)
          if (command_of_stage() & MERGE) return Cluster::finish_last(*this);
        OutputTarget target = find_rows();
        const int last = p_.stage;
        p_.next();
        next_command();
        finish_rows(target);
        wait_for_product();
        mbarrier_arrive(barriers_.p_empty(last));
        store(target);
        __syncwarp();
        release_kv();
      } else {
        if constexpr (Cluster::MERGES_LAST)
          if (command & MERGE) return Cluster::finish_last(*this);
        OutputTarget target = find_rows();
        finish_rows(target);
        epilogue_.store_zeros(target);
      }
    }
  }

 private:
  // Whether this warpgroup multiplies the peer's P, with the peer's keys.
  MLA_DEVICE bool of_peer() const { return Cluster::EXCHANGES_P && group_ == 1; }

  MLA_DEVICE int p_number() const { return of_peer() ? Traits::P_STAGES + p_.stage : p_.stage; }
  MLA_DEVICE uint32_t p_stage() const { return shared_ + Storage::P + p_number() * sizeof(PStage); }

  MLA_DEVICE int next_command() {
    const uint32_t full = barriers_.p_full(p_number());
    if (of_peer() && warpgroup_thread() == 0) mbarrier_expect_tx(full, sizeof(PStage));
    mbarrier_wait(full, p_.parity);
    return command_of_stage();
  }
  MLA_DEVICE int command_of_stage() const {
    return warp_uniform(ld_shared<int>(p_stage() + Storage::P_COMMAND + warpgroup_thread() / 32 * 4));
  }

  // This warp has read the P stage.
  MLA_DEVICE void release_p() {
    __syncwarp();
    const uint32_t empty = barriers_.p_empty(p_.stage);
    if (of_peer())  // who sent the P waits for both CTAs
      peer_mbarrier_arrive(map_to_peer(empty), warpgroup_thread() % 32 == 0);
    else
      mbarrier_arrive(empty);
    p_.next();
  }

  // All products of a tile, from the first `command` on; `meanwhile` runs beside the first. The last product is not
  // waited for.
  template <class Meanwhile>
  MLA_DEVICE void multiply(int command, const Meanwhile& meanwhile) {
    if constexpr (Cluster::EXCHANGES_P && HAS_MASKS)
      if (of_peer() && params_.window_left >= 0) clear_peer_before_window();
    begin_product(command & ~RESCALE);
    meanwhile();
    while (!(command & LAST)) {
      end_product();
      release_p();
      command = next_command();
      begin_product(command);
    }
  }

  // Issues O = O * factor + P V.
  MLA_DEVICE void begin_product(int command) {
    mbarrier_wait(kv_full(), kv_.parity);
    fence_proxy_async();  // for P, and for keys copied by threads; here, because the QK warpgroup's time is scarcer
    if constexpr (Cluster::EXCHANGES_P)
      if (of_peer() && (command & LAST)) clear_peer_rest();
    if (__builtin_expect(command & RESCALE, 0)) {
      const float factor[2] = {ld_shared<float>(p_stage() + Storage::P_FACTOR + quad_row() * 4),
                               ld_shared<float>(p_stage() + Storage::P_FACTOR + quad_row() * 4 + 32)};
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        o_[0][i] *= factor[i / 2 % 2];
        if constexpr (LAST_PRODUCT > 0) o_[1][i] *= factor[i / 2 % 2];
      }
    }
    const uint64_t p = make_descriptor(warp_uniform(p_stage()), 128, 256, Swizzle::none);
    const uint64_t v =
        make_descriptor(warp_uniform(values_at()), Traits::BLOCK_BYTES, Traits::GROUP_BYTES, Swizzle::bytes128);
    pin_accumulator(o_[0]);
    pin_accumulator(o_[LAST_PRODUCT]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k)
#pragma unroll
      for (int half = 0; half <= LAST_PRODUCT; ++half)
        pv_mma<Element>(
            o_[half], advance_descriptor(p, k * 2048),
            advance_descriptor(v, column_block(half) * Traits::BLOCK_BYTES + k * 2 * Traits::GROUP_BYTES), true);
    wgmma_commit();
  }

  // The column block that o_[half] begins with.
  MLA_DEVICE int column_block(int half) const { return 2 * (half ^ Cluster::first_half(group_)); }

  MLA_DEVICE uint32_t kv_full() const {
    if constexpr (Cluster::EXCHANGES_P)
      return of_peer() ? Cluster::peer_kv_full(barriers_, kv_.stage) : barriers_.kv_full(kv_.stage);
    else
      return barriers_.kv_full(kv_.stage);
  }
  MLA_DEVICE uint32_t kv_empty() const {
    if constexpr (Cluster::EXCHANGES_P)
      return of_peer() ? Cluster::peer_kv_empty(barriers_, kv_.stage) : barriers_.kv_empty(kv_.stage);
    else
      return barriers_.kv_empty(kv_.stage);
  }

  // This warpgroup's columns of the keys in the stage.
  MLA_DEVICE uint32_t values_at() const {
    constexpr int SIDE_BYTES = COLUMNS / 64 * Traits::BLOCK_BYTES;
    if (of_peer()) return shared_ + Storage::PEER_KV + kv_.stage * Traits::PEER_STAGE_BYTES;
    const int side = Cluster::EXCHANGES_P ? static_cast<int>(cluster_rank()) : group_;
    return shared_ + Storage::KV + kv_.stage * Traits::STAGE_BYTES + side * SIDE_BYTES;
  }

  // Zeros the values of the peer's keys past its tile's end, as the QK warpgroup does for this CTA's.
  MLA_DEVICE void clear_peer_rest() {
    const int used = ld_shared<int>(p_stage() + Storage::P_KEYS_LEFT);
    if (used < BLOCK_N) clear_keys<Traits, COLUMNS>(values_at(), used, BLOCK_N);
    named_barrier_sync<128>(PV_GROUP_BARRIER + group_);
  }

  // Zeros the values of what lies before the window in the first stage of the peer's keys.
  MLA_DEVICE void clear_peer_before_window() {
    const int skipped = Cluster::peer_skipped(params_);
    if (skipped == 0) return;
    mbarrier_wait(kv_full(), kv_.parity);
    clear_keys<Traits, COLUMNS>(values_at(), 0, skipped);
    named_barrier_sync<128>(PV_GROUP_BARRIER + group_);
  }

  // Waits for the product; then its KV stage may be filled again.
  MLA_DEVICE void end_product() {
    wait_for_product();
    release_kv();
  }

  MLA_DEVICE void wait_for_product() {
    wgmma_wait<0>();
    pin_accumulator(o_[0]);
    pin_accumulator(o_[LAST_PRODUCT]);
    __syncwarp();
  }

  MLA_DEVICE void release_kv() {
    consumer_release<Traits>(kv_empty());
    kv_.next(of_peer() ? Traits::PEER_STAGES : Traits::STAGES);
  }

  // Waits until all stages are empty, of which the readers of a peer that shares keys tell, too.
  MLA_DEVICE void wait_for_readers() const {
    auto kv = kv_;
#pragma unroll 1
    for (int stage = 0; stage < Traits::STAGES; ++stage, kv.next())
      mbarrier_wait(barriers_.kv_empty(kv.stage), kv.parity ^ 1);
  }

  // The rows of the tile that the P stage names; called while the last product is computed.
  MLA_DEVICE OutputTarget find_rows() const {
    wait_for_fill();
    const int sequence = warp_uniform(ld_shared<int>(p_stage() + Storage::P_SEQUENCE));
    const int partial_row = warp_uniform(ld_shared<int>(p_stage() + Storage::P_PARTIAL_ROW));
    return epilogue_.find_rows(sequence, partial_row);
  }

  // Waits until this CTA's partial has been filled with the sentinel.
  MLA_DEVICE void wait_for_fill() const {
    if constexpr (Traits::STREAMABLE)
      if (Traits::combine_streams(params_)) mbarrier_wait(Cluster::sentinel_fill(barriers_), 0);
  }

  // Takes the reciprocal denominators from the P stage that finishes the tile, and stores the rows' lse.
  MLA_DEVICE void finish_rows(OutputTarget& target) {
    target.factor[0] = ld_shared<float>(p_stage() + Storage::P_INVERSE + quad_row() * 4);
    target.factor[1] = ld_shared<float>(p_stage() + Storage::P_INVERSE + quad_row() * 4 + 32);
    if (group_ == 0 && !leaves_state(target)) epilogue_.store_lse(target, p_stage() + Storage::P_LSE);
    if (group_ == 1) MaxLogitsOf<Traits>::store(params_, p_stage());
    release_p();
  }

  // Whether the QK warpgroup stores what a partial has in place of a log-sum-exp.
  MLA_DEVICE bool leaves_state(const OutputTarget& target) const {
    if constexpr (Traits::FOLDS) return is_state(params_, target.partial);
    return false;
  }

  // All products of a work tile that is a node. Its sum begins with the first split's result, and is stored with the last.
  MLA_DEVICE void multiply_splits(int command) {
    for (;;) {
      multiply(command, [] {});
      const int last = p_.stage;
      p_.next();
      command = next_command();
      wait_for_product();
      mbarrier_arrive(barriers_.p_empty(last));
      const NodeSum::Factors factors(p_stage());
      const bool goes_on = (command & GOES_ON) != 0;
      if (goes_on) {
        release_p();
        release_kv();
      }
      if (!goes_on && !(command & FOLDED)) {
        NodeSum::of_one(o_, factors);
        break;
      }
      const NodeSum sum(params_, shared_ + Storage::NODE_SUM, group_);
      if (command & FOLDED)
        sum.add(o_, factors);
      else
        sum.begin(o_, factors);
      if (!goes_on) {
        sum.load(o_);
        break;
      }
#pragma unroll
      for (int i = 0; i < VALUES; ++i) o_[0][i] = o_[LAST_PRODUCT][i] = 0.0f;
      command = next_command();
    }
    OutputTarget target = find_rows();
    finish_rows(target);
    store(target);
    __syncwarp();
    release_kv();
  }

  // The epilogue's buffers are in the stage that was read last, once both warpgroups are done with it, or apart.
  MLA_DEVICE void store(const OutputTarget& target) {
    if constexpr (Traits::OUT_BYTES == 0) named_barrier_sync<PV_BARRIER, 256>();
    uint32_t buffer = Traits::OUT_BYTES == 0 ? shared_ + Storage::KV + kv_.stage * Traits::STAGE_BYTES
                                             : shared_ + Storage::OUT;
    if constexpr (Traits::OUT_IN_HALF) buffer += (Cluster::sharing_rank() ^ 1) * (Traits::STAGE_BYTES / 2);
    buffer += (group_ * 4 + warpgroup_thread() / 32) * Epilogue::BUFFER_BYTES;
    epilogue_.store(buffer, target, [&](int tile, float (&four)[4]) { scaled_tile(o_, tile, target.factor, four); });
  }
  const Params& params_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  int group_;
  Epilogue epilogue_;
  PipelineState<Traits::STAGES> kv_;
  PipelineState<Traits::P_STAGES> p_;
  Accumulator o_;
};

}  // namespace mla::sm_90
