// The two warpgroups that hold the result: O = O * factor + P V, 256 columns each.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/loader.hpp"
#include "sm_90/results.hpp"
#include "sm_90/sides.hpp"
#include "sm_90/together.hpp"

namespace mla::sm90 {

template <class Policy>
class Values {
  using T = typename Policy::Type;
  using Params = typename Policy::Params;

 public:
  // `group` 0 holds columns 0..255, group 1 the others. Where each block has one side (sides.hpp), both hold that one:
  // group 0 of what this block's scores make, group 1 of what the peer's do.
  MLA_DEVICE Values(const Params& params, uint32_t shared, int group)
      : params_(params),
        barriers_(shared),
        shared_(shared),
        group_(group),
        results_(params, Policy::SIDES
                             ? static_cast<int>(cluster_rank()) * VALUE_COLUMNS + group * Policy::STORED_COLUMNS
                             : group * VALUE_COLUMNS) {}

  // Does what the scores warpgroup orders, slot by slot. Each P V is waited for at once: the next P is handed over a
  // whole Q K^T later, and a stage given back early is worth more than a P V queued early.
  MLA_DEVICE void run() {
    for (;;) {
      int order = next_order();
      if (order & STOP) {
        if constexpr (Policy::SIDES) give_back_slot();
        return;
      }
      // Written for both cases: otherwise the compiler takes the registers to be live since the last item.
#pragma unroll
      for (int i = 0; i < 64; ++i) o_[0][i] = o_[1][i] = 0.0f;
      if ((order & (MULTIPLY | QUERIES)) && !of_peer()) {
        stages_.next();
        stages_.next();
      }
      if constexpr (Policy::TWO_CUTS) return merge_two(order);
      if (order & MULTIPLY) {
        multiply(order, [] {});
        Ending ending = find_rows();
        const int last = slots_.stage;
        slots_.next();
        next_order();
        finish_rows(ending);
        wait_for_product();
        barrier_arrive(barriers_.p_empty(last));
        store(ending);
        __syncwarp();
        give_back_stage();
      } else {
        Ending ending = find_rows();
        finish_rows(ending);
        results_.store_zeros(ending);
      }
    }
  }

 private:
  // Whether the P's, and the keys that go with them, are the peer's.
  MLA_DEVICE bool of_peer() const { return Policy::SIDES && group_ == 1; }

  MLA_DEVICE int slot_number() const { return of_peer() ? Policy::P_SLOTS + slots_.stage : slots_.stage; }
  MLA_DEVICE uint32_t slot() const { return shared_ + Policy::P_OFFSET + slot_number() * Policy::P_SLOT_BYTES; }

  MLA_DEVICE int next_order() {
    const uint32_t full = barriers_.p_full(slot_number());
    if (of_peer() && group_thread() == 0) barrier_expect(full, Policy::P_SLOT_BYTES);
    barrier_wait(full, slots_.parity);
    return uniform(load_shared<int>(slot() + Policy::ORDER + group_thread() / 32 * 4));
  }

  // This warp has read the slot.
  MLA_DEVICE void give_back_slot() {
    __syncwarp();
    const uint32_t empty = barriers_.p_empty(slots_.stage);
    if (of_peer())  // who sent the P waits for both blocks
      peer_arrive(at_peer(empty), group_thread() % 32 == 0);
    else
      barrier_arrive(empty);
    slots_.next();
  }

  // All of an item's products, from the first `order` on; `meanwhile` runs beside the first. Of the last, nobody waits
  // for the end yet.
  template <class Meanwhile>
  MLA_DEVICE void multiply(int order, const Meanwhile& meanwhile) {
    begin_product(order & ~RESCALE);
    meanwhile();
    while (!(order & LAST)) {
      end_product();
      give_back_slot();
      order = next_order();
      begin_product(order);
    }
  }

  // Starts O = O * factor + P V.
  MLA_DEVICE void begin_product(int order) {
    barrier_wait(of_peer() ? barriers_.peer_full(stages_.stage) : barriers_.kv_full(stages_.stage), stages_.parity);
    fence_async();  // for P, and for keys brought by ordinary copies; here, because the scores' time is scarcer
    if constexpr (Policy::SIDES)
      if (of_peer() && (order & LAST)) clear_rest();
    if (__builtin_expect(order & RESCALE, 0)) {
      const float factor[2] = {load_shared<float>(slot() + Policy::FACTOR + quad_row() * 4),
                               load_shared<float>(slot() + Policy::FACTOR + quad_row() * 4 + 32)};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        o_[0][i] *= factor[i / 2 % 2];
        o_[1][i] *= factor[i / 2 % 2];
      }
    }
    const uint64_t p = operand(uniform(slot()), 128, 256, Swizzle::none);
    const uint64_t v = operand(uniform(values_at()), Policy::BLOCK_BYTES, Policy::GROUP_BYTES, Swizzle::bytes128);
    pin(o_[0]);
    pin(o_[1]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Policy::KEYS / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        values_mma<T>(o_[half], advance(p, k * 2048),
                      advance(v, block_of(half) * Policy::BLOCK_BYTES + k * 2 * Policy::GROUP_BYTES), true);
    wgmma_commit();
  }

  // The column block that o_[half] begins with: where each block has one side, what this warpgroup keeps comes first.
  MLA_DEVICE int block_of(int half) const { return 2 * (Policy::SIDES ? half ^ group_ : half); }

  // This warpgroup's 256 columns of the keys in the stage.
  MLA_DEVICE uint32_t values_at() const {
    constexpr int SIDE_BYTES = VALUE_COLUMNS / 64 * Policy::BLOCK_BYTES;
    if (of_peer()) return shared_ + Policy::PEER_OFFSET + stages_.stage * Policy::PEER_STAGE_BYTES;
    const int side = Policy::SIDES ? static_cast<int>(cluster_rank()) : group_;
    return shared_ + Policy::KV_OFFSET + stages_.stage * Policy::STAGE_BYTES + side * SIDE_BYTES;
  }

  // What the scores do for their own block: values of keys past the end become 0.
  MLA_DEVICE void clear_rest() {
    const int used = load_shared<int>(slot() + Policy::KEYS_LEFT);
    if (used < Policy::KEYS) clear_keys<Policy, VALUE_COLUMNS>(values_at(), used);
    group_sync(GROUP_BARRIER + group_);
  }

  // Waits for the product; then its stage may be filled again.
  MLA_DEVICE void end_product() {
    wait_for_product();
    give_back_stage();
  }

  MLA_DEVICE void wait_for_product() {
    wgmma_wait<0>();
    pin(o_[0]);
    pin(o_[1]);
    __syncwarp();
  }

  MLA_DEVICE void give_back_stage() {
    warp_release<Policy>(of_peer() ? barriers_.peer_empty(stages_.stage) : barriers_.kv_empty(stages_.stage));
    stages_.next(of_peer() ? Policy::PEER_STAGES : Policy::STAGES);
  }

  // Of the item that the slot names; called while the last product is computed.
  MLA_DEVICE Ending find_rows() const {
    await_filled();
    const int sequence = uniform(load_shared<int>(slot() + Policy::ITEM));
    const int partial_row = uniform(load_shared<int>(slot() + Policy::ITEM + 4));
    return results_.find_rows(sequence, partial_row);
  }

  // Of a block's only item, the number of which is the block's; of the cluster's, once they are merged.
  MLA_DEVICE Ending find_only_rows() const {
    const int number = static_cast<int>(blockIdx.y);
    const int sequence = divided(number, params_.splits_magic, params_.splits_shift);
    return results_.find_rows(sequence, params_.num_splits == 2 ? -1 : number / 2);
  }

  // That what combine waits for is NOT_YET.
  MLA_DEVICE void await_filled() const {
    if constexpr (Policy::AWAITABLE)
      if (Policy::awaited(params_)) barrier_wait(barriers_.filled(), 0);
  }

  // Takes the reciprocals from the slot that finishes the item, and writes the rows' lse to memory.
  MLA_DEVICE void finish_rows(Ending& ending) {
    ending.factor[0] = load_shared<float>(slot() + Policy::INVERSE + quad_row() * 4);
    ending.factor[1] = load_shared<float>(slot() + Policy::INVERSE + quad_row() * 4 + 32);
    if (group_ == 0) results_.store_lse(ending, slot() + Policy::LSE);
    give_back_slot();
  }

  // The only item of a block that has one of two cuts. Its rows are found early, when nothing waits for it.
  MLA_DEVICE void merge_two(int order) {
    if constexpr (Policy::TOGETHER) {
      const Ending ending = find_only_rows();
      if (order & MULTIPLY) multiply(order, [] {});
      wait_for_product();
      Together<Policy>(params_, shared_, group_).merge(o_, ending);
    } else if (order & MULTIPLY) {  // a path for each: where they met, the last product would be waited for
      Ending ending;
      multiply(order, [&] { ending = find_only_rows(); });
      merge_sides(ending);
    } else {
      Ending ending = find_only_rows();
      merge_sides(ending);
    }
  }

  MLA_DEVICE void merge_sides(Ending& ending) {
    await_filled();
    const Sides<Policy> sides(results_, shared_, group_);
    sides.weigh(ending);
    wait_for_product();
    give_back_slot();
    sides.merge(o_, ending);
  }

  // By way of the stage that was read last, once both warpgroups are done with it.
  MLA_DEVICE void store(const Ending& ending) {
    asm volatile("bar.sync %0, 256;" ::"n"(VALUES_BARRIER) : "memory");
    const uint32_t room = shared_ + Policy::KV_OFFSET + stages_.stage * Policy::STAGE_BYTES +
                          (group_ * 4 + group_thread() / 32) * Results<Policy>::ROOM_BYTES;
    results_.store(room, ending, [&](int tile, float (&four)[4]) { scaled_tile(o_, tile, ending.factor, four); });
  }
  static_assert(8 * Results<Policy>::ROOM_BYTES <= Policy::STAGE_BYTES, "all warps' room is in a stage");

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int group_;
  Results<Policy> results_;
  Ring<Policy::STAGES> stages_;
  Ring<Policy::P_SLOTS> slots_;
  Products o_;  // 128 columns each
};

}  // namespace mla::sm90
