// The two warpgroups that hold the result: O = O * factor + P V, 256 columns each, and its way to memory.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/loader.hpp"

namespace mla::sm90 {

// Two lanes hold two columns each of two 8-column tiles; afterwards the even one holds all four of the first tile, the
// odd one those of the second.
MLA_DEVICE uint2 exchange_pair(uint32_t first, uint32_t second) {
  const bool odd = group_thread() & 1;
  const uint32_t got = __shfl_xor_sync(~0u, odd ? first : second, 1);
  return odd ? make_uint2(got, second) : make_uint2(first, got);
}

template <class Policy>
class Values {
  using T = typename Policy::Type;
  using Params = typename Policy::Params;

 public:
  // `side` 0 holds columns 0..255, side 1 the others.
  MLA_DEVICE Values(const Params& params, uint32_t shared, int side)
      : params_(params), barriers_(shared), shared_(shared), side_(side) {}

  // Does what the scores warpgroup orders, slot by slot. Each P V is waited for at once: the next P is handed over a whole
  // Q K^T later, and a stage given back early is worth more than a P V queued early.
  MLA_DEVICE void run() {
    for (;;) {
      int order = next_order();
      if (order & STOP) return;
      // Said for both cases: otherwise the registers count as in use since the last item.
#pragma unroll
      for (int i = 0; i < 64; ++i) o_[0][i] = o_[1][i] = 0.0f;
      if (order & MULTIPLY) {
        stages_.next();  // two stages of queries
        stages_.next();
        multiply(false);
        while (!(order & LAST)) {
          give_back();
          order = next_order();
          multiply(order & RESCALE);
        }
        warp_release<Policy>(barriers_.kv_empty(stages_.stage));
        stages_.next();
      }
      // The slot is given back after its last numbers were read, at the end: the next item's P V cannot begin before.
      store();
      __syncwarp();
      warp_arrive(barriers_.p_empty(slots_.stage));
      slots_.next();
    }
  }

 private:
  MLA_DEVICE uint32_t slot() const { return shared_ + Policy::P_OFFSET + slots_.stage * Policy::P_SLOT_BYTES; }
  MLA_DEVICE int row() const { return group_thread() / 32 * 16 + group_thread() % 32 / 4; }

  MLA_DEVICE int next_order() {
    barrier_wait(barriers_.p_full(slots_.stage), slots_.parity);
    return uniform(load_shared<int>(slot() + Policy::ORDER + group_thread() / 32 * 4));
  }

  // This warp has read the slot and the stage.
  MLA_DEVICE void give_back() {
    __syncwarp();
    warp_release<Policy>(barriers_.kv_empty(stages_.stage));
    warp_arrive(barriers_.p_empty(slots_.stage));
    stages_.next();
    slots_.next();
  }

  // O = O * factor + P V.
  MLA_DEVICE void multiply(bool rescale) {
    barrier_wait(barriers_.kv_full(stages_.stage), stages_.parity);
    fence_async();  // P, and keys that ordinary copies brought; here and not where P is made, whose time is scarcer
    if (__builtin_expect(rescale, 0)) {
      const float factor[2] = {load_shared<float>(slot() + Policy::FACTOR + row() * 4),
                               load_shared<float>(slot() + Policy::FACTOR + row() * 4 + 32)};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        o_[0][i] *= factor[i / 2 % 2];
        o_[1][i] *= factor[i / 2 % 2];
      }
    }
    const uint64_t p = operand(uniform(slot()), 128, 256, Swizzle::none);
    const uint64_t v = operand(uniform(shared_ + Policy::KV_OFFSET + stages_.stage * Policy::STAGE_BYTES +
                                       side_ * (VALUE_COLUMNS / 64) * Policy::BLOCK_BYTES),
                               Policy::BLOCK_BYTES, 1024, Swizzle::bytes128);
    pin(o_[0]);
    pin(o_[1]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Policy::KEYS / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        values_mma<T>(o_[half], advance(p, k * 2048), advance(v, half * 2 * Policy::BLOCK_BYTES + k * 2048),
                      true);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o_[0]);
    pin(o_[1]);
  }

  // This thread's two rows, eight apart. All lanes take part: those of a quad share a row, so they agree on validity.
  MLA_DEVICE void store() {
    const int partial_row = uniform(load_shared<int>(slot() + Policy::ITEM + 4));
    const Queries queries(params_, uniform(load_shared<int>(slot() + Policy::ITEM)));
    const Heads heads(params_);
    const int first_row = blockIdx.x % params_.row_tiles * ROWS + row();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = load_shared<float>(slot() + Policy::INVERSE + (row() + half * 8) * 4);
      const Row mine(heads, queries, first_row + half * 8);
      const int64_t token = queries.first_token + mine.token;
      if (side_ == 0 && group_thread() % 4 == 0 && mine.valid) {
        const float lse = load_shared<float>(slot() + Policy::LSE + (row() + half * 8) * 4);
        if (partial_row < 0) params_.lse[token * params_.heads + mine.head] = lse;
        else params_.partial_lse[partial_at(partial_row, mine)] = lse;
      }
      if (partial_row < 0)
        store_result(half, inverse, mine.valid,
                     static_cast<uint16_t*>(params_.out) + token * params_.out_token_stride +
                         mine.head * params_.out_head_stride + side_ * VALUE_COLUMNS);
      else if (mine.valid)
        store_partial(half, inverse, params_.partial_out + partial_at(partial_row, mine) * D_V + side_ * VALUE_COLUMNS);
    }
  }

  // out: [256] of a row in 16 bits
  MLA_DEVICE void store_result(int half, float inverse, bool valid, uint16_t* out) const {
    out += group_thread() % 2 * 8 + group_thread() % 4 / 2 * 4;
#pragma unroll
    for (int tile = 0; tile < 32; tile += 2) {
      const float(&o)[64] = o_[tile / 16];
      const int at = tile % 16 * 4 + half * 2;
      const uint2 four = exchange_pair(pack<T>(o[at] * inverse, o[at + 1] * inverse),
                                       pack<T>(o[at + 4] * inverse, o[at + 5] * inverse));
      if (valid) *reinterpret_cast<uint2*>(out + tile * 8) = four;
    }
  }

  // partial: [256] of a row in fp32
  MLA_DEVICE void store_partial(int half, float inverse, float* partial) const {
    partial += group_thread() % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < 32; ++tile) {
      const float(&o)[64] = o_[tile / 16];
      const int at = tile % 16 * 4 + half * 2;
      *reinterpret_cast<float2*>(partial + tile * 8) = make_float2(o[at] * inverse, o[at + 1] * inverse);
    }
  }

  MLA_DEVICE int64_t partial_at(int partial_row, const Row& row) const {
    return static_cast<int64_t>(partial_row) * Policy::rows(params_) + row.index;
  }

  template <class V>
  MLA_DEVICE V load_shared(uint32_t from) const {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return bit_cast<V>(value);
  }

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int side_;
  Ring<Policy::STAGES> stages_;
  Ring<Policy::P_SLOTS> slots_;
  float o_[2][64];  // columns 0..127 and 128..255 of this side
};

}  // namespace mla::sm90
