// The two warpgroups that hold the result: O = O * factor + P V, 256 columns each, and its way to memory. They also
// bring the keys.
#pragma once

#include "sm_90/loader.hpp"

namespace mla::sm90 {

constexpr int VALUES_BARRIER = 2;

// A quad's four lanes hold four 8-column tiles, two columns each; afterwards lane t holds all of tile t.
MLA_DEVICE void transpose_quad(uint32_t (&v)[4], int lane) {
  const bool odd = lane & 1;
  const bool high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
    if (odd) v[i] = got;
    else v[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
    if (high) v[i] = got;
    else v[i + 2] = got;
  }
}

template <class Policy>
class Values {
  using T = typename Policy::Type;

 public:
  // `side` 0 holds columns 0..255, side 1 the others; `thread` counts within the warpgroup.
  MLA_DEVICE Values(const DecodeParams& params, uint32_t shared, int side, int thread)
      : params_(params), barriers_(shared), shared_(shared), side_(side), thread_(thread) {}

  MLA_DEVICE void run() {
    Loader<Policy> loader(params_, shared_, side_, thread_);
    for (int stage = 0; stage < Policy::STAGES; ++stage) loader.next();
    WorkList work = work_list<Policy>(params_);
    Item item;
    while (work.next(item)) {
      inverse_[0] = inverse_[1] = 0.0f;
      if (item.keys() == 0) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o_[i] = 0.0f;
      }
      for (int first = item.first; first < item.end; first += Policy::KEYS) {
        step(first > item.first, first + Policy::KEYS >= item.end);
        loader.next();
      }
      const Queries queries(params_, item.sequence);
      store<0>(item, queries);
      store<1>(item, queries);
    }
  }

 private:
  MLA_DEVICE void step(bool add, bool last) {
    const int warp = thread_ / 32;
    const int row = warp * 16 + thread_ % 32 / 4;
    barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
    barrier_wait(barriers_.p_full(), p_parity_);
    p_parity_ ^= 1;
    fence_async();
    if (add && load_float(Policy::FLAG_OFFSET + warp * 4) != 0.0f) {
      const float factor[2] = {load_float(Policy::FACTOR_OFFSET + row * 4),
                               load_float(Policy::FACTOR_OFFSET + row * 4 + 32)};
#pragma unroll
      for (int i = 0; i < 128; ++i) o_[i] *= factor[i / 2 % 2];
    }
    if (last) {
      inverse_[0] = load_float(Policy::INVERSE_OFFSET + row * 4);
      inverse_[1] = load_float(Policy::INVERSE_OFFSET + row * 4 + 32);
    }
    const uint64_t p = operand(shared_ + Policy::P_OFFSET, 128, 256, Swizzle::none);
    const uint64_t v = operand(shared_ + Policy::KV_OFFSET + ring_.stage * Policy::STAGE_BYTES +
                                   side_ * (VALUE_COLUMNS / 64) * Policy::BLOCK_BYTES,
                               Policy::BLOCK_BYTES, 1024, Swizzle::bytes128);
    pin(o_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Policy::KEYS / 16; ++k)
      values_mma<T>(o_, advance(p, k * 2048), advance(v, k * 2048), add || k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o_);
    if (thread_ % 32 == 0) barrier_arrive(barriers_.p_empty());
    // Every warp has read this stage, so it may be filled again. Constant ids: a computed one reserves all 16 barriers.
    if (side_ == 0) group_sync(VALUES_BARRIER);
    else group_sync(VALUES_BARRIER + 1);
    ring_.next();
  }

  // This thread's row HALF of two. All lanes take part: those of a quad share a row, so they agree on `row.valid`.
  template <int HALF>
  MLA_DEVICE void store(const Item& item, const Queries& queries) {
    const int first_row = blockIdx.x % params_.row_tiles * ROWS;
    const Row row(params_, queries, first_row + thread_ / 32 * 16 + thread_ % 32 / 4 + HALF * 8);
    if (item.partial_row < 0) {
      uint16_t* out = static_cast<uint16_t*>(params_.out) +
                      (queries.first_token + row.token) * params_.out_token_stride +
                      row.head * params_.out_head_stride + side_ * VALUE_COLUMNS + thread_ % 4 * 8;
#pragma unroll
      for (int group = 0; group < 8; ++group) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = group * 16 + i * 4 + HALF * 2;
          v[i] = pack<T>(o_[at] * inverse_[HALF], o_[at + 1] * inverse_[HALF]);
        }
        transpose_quad(v, thread_);
        if (row.valid) *reinterpret_cast<uint4*>(out + group * 32) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    } else if (row.valid) {
      float* out = params_.partial_out + (static_cast<int64_t>(item.partial_row) * params_.rows + row.index) * D_V +
                   side_ * VALUE_COLUMNS + thread_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int at = i * 4 + HALF * 2;
        *reinterpret_cast<float2*>(out + i * 8) = make_float2(o_[at] * inverse_[HALF], o_[at + 1] * inverse_[HALF]);
      }
    }
  }

  MLA_DEVICE float load_float(int offset) const {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared_ + offset) : "memory");
    return value;
  }

  const DecodeParams& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int side_;
  int thread_;
  Ring<Policy::STAGES> ring_;
  uint32_t p_parity_ = 0;
  float inverse_[2];
  float o_[128];
};

}  // namespace mla::sm90
