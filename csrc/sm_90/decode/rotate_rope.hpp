// Un-rotated keys: two of the producer's warps rotate the rope part of every stage in shared memory, between its arrival
// and Q K^T. Value i of the 64 is rotated with value i + 32 by the angle of the key's position, and rounded to Element,
// so the result is that of a cache of rotated keys.
#pragma once

#include "common/encode.hpp"
#include "sm_90/decode/pipeline.hpp"
#include "sm_90/decode/shared_storage.hpp"
#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/math.hpp"

namespace mla::sm_90 {

// Four values of the first half of the rope part, and their partners of the second.
template <class Element>
struct RopeQuad {
  uint32_t low[2], high[2];
  uint32_t cos[4], sin[4];

  MLA_DEVICE static float as_float(uint32_t bits) { return bit_cast<float>(bits); }

  // Two values and their partners become rotated ones.
  MLA_DEVICE void rotate(int i) {
    float a[2], b[2];
    unpack_pair<Element>(low[i], a);
    unpack_pair<Element>(high[i], b);
#pragma unroll
    for (int e = 0; e < 2; ++e) mla::rotate<RoundedApart>(a[e], b[e], as_float(cos[2 * i + e]), as_float(sin[2 * i + e]));
    low[i] = pack_pair<Element>(a[0], a[1]);
    high[i] = pack_pair<Element>(b[0], b[1]);
  }
};

// The work of one of the two warps, on the stages of all tiles in their order.
template <class Traits>
class RopeRotator {
  using Element = typename Traits::Element;
  static constexpr int TURNS = BLOCK_N / 8;  // in each the two warps rotate eight keys
  static_assert(Traits::ROTATORS == 64 && Traits::BLOCK_BYTES == BLOCK_N * 128);

 public:
  MLA_DEVICE explicit RopeRotator(uint32_t shared) : barriers_(shared), shared_(shared) {}

  // All tiles of the list. `queries`: those of the first tile are loaded even if it has no keys.
  template <class Scheduler>
  MLA_DEVICE void all_tiles(Scheduler& scheduler, bool queries) {
    scheduler.resolve_bounds();
    for (; scheduler.more(); queries = false) {
      tile(scheduler.tile(), queries);
      scheduler.next();
    }
  }

  // The stages of a tile: two of queries, which are only passed on, and those of its keys.
  MLA_DEVICE void tile(const WorkTile& tile, bool queries) {
    if (queries || tile.keys() != 0) {
      pass_on([](int) {});
      pass_on([](int) {});
    }
    for (int first = tile.template first_stage<Traits::SPLIT_ALIGNMENT>(); first < tile.end_key; first += BLOCK_N)
      pass_on([&](int stage) { rotate(stage); });
  }

 private:
  template <class Work>
  MLA_DEVICE void pass_on(const Work& work) {
    mbarrier_wait(barriers_.rope_full(kv_.stage), kv_.parity);
    work(kv_.stage);
    mbarrier_arrive(barriers_.kv_full(kv_.stage));
    kv_.next();
  }

  // Eight lanes have a key, each four values and their partners. Lanes 0..15 have keys four apart, as have the others:
  // there the swizzle puts the two halves of a rope part the other way round, so that 16 lanes use all banks.
  // Keys past the tile's end may be rotated by whatever lay where no row was copied to; their scores are masked.
  MLA_DEVICE void rotate(int number) const {
    const uint32_t thread = warpgroup_thread() % 64, lane = thread % 32;
    const uint32_t key = thread / 32 * 2 + lane / 16 + lane / 8 % 2 * 4, place = lane % 8;
    const uint32_t stage = shared_ + SharedStorage<Traits>::KV + number * Traits::STAGE_BYTES;
    const uint32_t rope = stage + Traits::ROPE_AT + key * 128 + (place / 2 ^ key) * 16 + place % 2 * 8;
    const uint32_t angles = stage + Traits::COS_SIN_AT + key * Traits::COS_SIN_BYTES + place * 16;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const uint32_t low = rope + turn * 8 * 128, high = low ^ 64;
      const uint32_t cos = angles + turn * 8 * Traits::COS_SIN_BYTES;
      RopeQuad<Element> quad;
      ld_shared_v2(low, quad.low);
      ld_shared_v2(high, quad.high);
      ld_shared_v4(cos, quad.cos);
      ld_shared_v4(cos + Traits::COS_SIN_BYTES / 2, quad.sin);
      quad.rotate(0);
      quad.rotate(1);
      st_shared_v2(low, quad.low);
      st_shared_v2(high, quad.high);
    }
  }

  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  PipelineState<Traits::STAGES> kv_;
};

}  // namespace mla::sm_90
