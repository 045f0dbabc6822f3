// The warpgroup that makes scores and probabilities: S = Q K^T, online softmax, P to shared memory.
//
// S has two buffers: the next block's Q K^T runs on the tensor cores while this block's softmax runs on the others.
// The reference maximum of a row moves only when a score passes it by more than 2^8 (in powers of two); until then P may
// exceed 1, which costs nothing in a floating format, and the 64 x 512 result need not be rescaled.
#pragma once

#include "sm_90/loader.hpp"

namespace mla::sm90 {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float MAX_GROWTH = 8.0f;
constexpr float INFINITE = __builtin_huge_valf();
constexpr int SCORES_BARRIER = 1;

MLA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

MLA_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
MLA_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <class Policy>
class Scores {
  using T = typename Policy::Type;
  static constexpr int REGS = Policy::KEYS / 2;

 public:
  MLA_DEVICE Scores(const DecodeParams& params, uint32_t shared, int thread)
      : params_(params), barriers_(shared), shared_(shared), thread_(thread), scale_(params.softmax_scale * LOG2E) {}

  MLA_DEVICE void run() {
    WorkList work = work_list<Policy>(params_);
    Item item;
    while (work.next(item)) one_item(item);
    item_.sequence = 0;
    hand_over(STOP);
  }

 private:
  MLA_DEVICE void load_q(const Item& item, const Queries& queries) {
    const auto* q = static_cast<const uint16_t*>(params_.q);
    const int64_t base = params_.cu_seqlens_q != nullptr ? queries.first_token * params_.q_token_stride
                                                         : item.sequence * params_.q_batch_stride;
    group_sync(SCORES_BARRIER);  // the other warps' wgmma of the last item read Q too
    constexpr int PIECES = Policy::Q_SHARED_STEPS * 2;  // 16-byte pieces of a row
    static_assert(ROWS * PIECES % 128 == 0, "");
#pragma unroll 4
    for (int i = 0; i < ROWS * PIECES / 128; ++i) {
      const int index = i * 128 + thread_;
      const int local = index / PIECES;
      const int piece = index - local * PIECES;
      const Row row(params_, queries, first_row() + local);
      const uint16_t* from = row.valid ? q + base + row.token * params_.q_token_stride + row.head * params_.q_head_stride : q;
      copy16(shared_ + Policy::Q_OFFSET + piece / 2 * 2048 + local / 8 * 256 + piece % 2 * 128 + local % 8 * 16,
             from + piece * 8, row.valid);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row(params_, queries, first_row() + thread_ / 32 * 16 + thread_ % 32 / 4 + half * 8);
      const uint16_t* from = q + base + row.token * params_.q_token_stride + row.head * params_.q_head_stride +
                             Policy::Q_SHARED_STEPS * 16 + thread_ % 4 * 2;
#pragma unroll
      for (int k = 0; k < Policy::Q_REGISTER_STEPS; ++k) {
        q_[4 * k + half] = row.valid ? __ldg(reinterpret_cast<const uint32_t*>(from + 16 * k)) : 0;
        q_[4 * k + half + 2] = row.valid ? __ldg(reinterpret_cast<const uint32_t*>(from + 16 * k + 8)) : 0;
      }
      row_limit_[half] = row.limit(params_, queries, item);
    }
    copies_wait();
    fence_async();
    group_sync(SCORES_BARRIER);
  }

  // Starts S = Q K^T for the ring's next stage.
  MLA_DEVICE void start(float (&s)[REGS]) {
    barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
    if constexpr (Policy::SOURCE == Source::gather) fence_async();
    const uint32_t stage = uniform(shared_ + Policy::KV_OFFSET + ring_.stage * Policy::STAGE_BYTES);
    const uint64_t keys = operand(stage, 0, 1024, Swizzle::bytes128);
    const uint64_t q = operand(shared_ + Policy::Q_OFFSET, 128, 256, Swizzle::none);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Policy::Q_SHARED_STEPS; ++k)
      scores_mma<T>(s, advance(q, k * 2048), advance(keys, k / 4 * Policy::BLOCK_BYTES + k % 4 * 32), k > 0);
#pragma unroll
    for (int k = 0; k < Policy::Q_REGISTER_STEPS; ++k) {
      constexpr int FIRST = Policy::Q_SHARED_STEPS;
      scores_mma<T>(s, &q_[4 * k],
                    advance(keys, (FIRST + k) / 4 * Policy::BLOCK_BYTES + (FIRST + k) % 4 * 32), true);
    }
    wgmma_commit();
    ring_.next();
  }

  // Probabilities of one block to shared memory, with what the values warpgroups need beside them.
  MLA_DEVICE void finish(float (&s)[REGS], int first, bool last) {
    const int lane = thread_ % 32;
    const int warp = thread_ / 32;
    if (first + Policy::KEYS > row_limit_[0] || first + Policy::KEYS > row_limit_[1]) {
#pragma unroll
      for (int i = 0; i < REGS; ++i) {
        const int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (key >= row_limit_[i / 2 % 2]) s[i] = -INFINITE;
      }
    }
    float top[2] = {-INFINITE, -INFINITE};
#pragma unroll
    for (int i = 0; i < REGS; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    top[0] = quad_max(top[0]);
    top[1] = quad_max(top[1]);
    const bool grows = (top[0] - maximum_[0]) * scale_ > MAX_GROWTH || (top[1] - maximum_[1]) * scale_ > MAX_GROWTH;
    const bool rescale = __any_sync(~0u, grows);
    float factor[2] = {1.0f, 1.0f};
    if (rescale) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float higher = fmaxf(maximum_[half], top[half]);
        if (higher != -INFINITE) factor[half] = exp2_fast((maximum_[half] - higher) * scale_);
        maximum_[half] = higher;
        sum_[half] *= factor[half];
      }
    }
    const float offset[2] = {maximum_[0] == -INFINITE ? 0.0f : maximum_[0] * scale_,
                             maximum_[1] == -INFINITE ? 0.0f : maximum_[1] * scale_};
    uint32_t p[REGS / 2];
#pragma unroll
    for (int i = 0; i < REGS; i += 2) {
      const int half = i / 2 % 2;
      const float a = exp2_fast(fmaf(s[i], scale_, -offset[half]));
      const float b = exp2_fast(fmaf(s[i + 1], scale_, -offset[half]));
      sum_[half] += a + b;
      p[i / 2] = pack<T>(a, b);
    }
    float inverse[2] = {0.0f, 0.0f};
    if (last) {
      finish_rows(inverse);
      if constexpr (Policy::SOURCE == Source::tma) clear_from(item_.end - first);
    }

    const uint32_t slot = shared_ + Policy::P_OFFSET + slots_.stage * Policy::P_SLOT_BYTES;
    wait_slot();
    const int matrix = lane / 8;
    const uint32_t to = slot + (2 * warp + matrix % 2) * 256 + matrix / 2 * 128 + lane % 8 * 16;
#pragma unroll
    for (int k = 0; k < Policy::KEYS / 16; ++k)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + k * 2048),
                   "r"(p[4 * k]), "r"(p[4 * k + 1]), "r"(p[4 * k + 2]), "r"(p[4 * k + 3])
                   : "memory");
    const uint32_t row = slot + (warp * 16 + lane / 4) * 4;
    if (lane % 4 == 0) {
      store_shared(row + Policy::FACTOR, factor[0]);
      store_shared(row + Policy::FACTOR + 32, factor[1]);
      if (last) {
        store_shared(row + Policy::INVERSE, inverse[0]);
        store_shared(row + Policy::INVERSE + 32, inverse[1]);
      }
    }
    if (lane == 0) store_shared(slot + Policy::RESCALE + warp * 4, rescale ? 1 : 0);
    hand_over(MULTIPLY | (last ? LAST : 0));
  }

  MLA_DEVICE void wait_slot() {
    barrier_wait(barriers_.p_empty(slots_.stage, 0), slots_.parity ^ 1);
    barrier_wait(barriers_.p_empty(slots_.stage, 1), slots_.parity ^ 1);
  }

  // The slot is the values warpgroups' from here on.
  MLA_DEVICE void hand_over(int order) {
    const uint32_t slot = shared_ + Policy::P_OFFSET + slots_.stage * Policy::P_SLOT_BYTES;
    if ((order & MULTIPLY) == 0) wait_slot();
    if (thread_ == 0)
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, 0};" ::"r"(slot + Policy::ORDER), "r"(order),
                   "r"(item_.sequence), "r"(item_.partial_row)
                   : "memory");
    fence_async();
    __syncwarp();
    if (thread_ % 32 == 0) barrier_arrive(barriers_.p_full(slots_.stage));
    slots_.next();
  }

  // Zeros for the values of keys past the item's end in the last stage: their probabilities are 0, but what the copy
  // engine found there may be NaN. The keys' scores were masked, so a warp still reading them does no harm.
  MLA_DEVICE void clear_from(int used) {
    const int stage = (ring_.stage == 0 ? Policy::STAGES : ring_.stage) - 1;
    const uint32_t base = shared_ + Policy::KV_OFFSET + stage * Policy::STAGE_BYTES;
    for (int i = used * 64 + thread_; i < Policy::KEYS * 64; i += 128) {
      const uint32_t to = base + i % 64 / 8 * Policy::BLOCK_BYTES + i / 64 * 128 + i % 8 * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }

  // 1 / denominator of this thread's rows, and their lse to memory.
  MLA_DEVICE void finish_rows(float (&inverse)[2]) {
    const Queries queries(params_, item_.sequence);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row(params_, queries, first_row() + thread_ / 32 * 16 + thread_ % 32 / 4 + half * 8);
      const float sum = quad_sum(sum_[half]);
      const bool any = sum > 0.0f;
      float denominator = sum;
      const bool whole = item_.partial_row < 0;
      if (any && whole && params_.attn_sink != nullptr && row.valid)
        denominator += exp2_fast(__ldg(params_.attn_sink + row.head) * LOG2E - maximum_[half] * scale_);
      inverse[half] = any ? 1.0f / denominator : 0.0f;
      if (row.valid && thread_ % 4 == 0) {
        const float lse = any ? (maximum_[half] * scale_ + __log2f(sum)) * LN2 : -INFINITE;
        if (whole) params_.lse[(queries.first_token + row.token) * params_.heads + row.head] = lse;
        else params_.partial_lse[static_cast<int64_t>(item_.partial_row) * params_.rows + row.index] = lse;
      }
    }
  }

  MLA_DEVICE void one_item(const Item& item) {
    item_ = item;
    maximum_[0] = maximum_[1] = -INFINITE;
    sum_[0] = sum_[1] = 0.0f;
    if (item.keys() == 0) {
      float unused[2];
      finish_rows(unused);
      hand_over(LAST);
      return;
    }
    load_q(item, Queries(params_, item.sequence));
    float even[REGS], odd[REGS];
    start(even);
    for (int first = item.first;;) {
      int next = first + Policy::KEYS;
      if (next >= item.end) {
        wgmma_wait<0>();
        pin(even);
        finish(even, first, true);
        return;
      }
      start(odd);
      wgmma_wait<1>();
      pin(even);
      finish(even, first, false);
      first = next;
      next += Policy::KEYS;
      if (next >= item.end) {
        wgmma_wait<0>();
        pin(odd);
        finish(odd, first, true);
        return;
      }
      start(even);
      wgmma_wait<1>();
      pin(odd);
      finish(odd, first, false);
      first = next;
    }
  }

  MLA_DEVICE int first_row() const { return blockIdx.x % params_.row_tiles * ROWS; }

  template <class V>
  MLA_DEVICE void store_shared(uint32_t to, V value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bit_cast<uint32_t>(value)) : "memory");
  }

  const DecodeParams& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int thread_;
  float scale_;
  Ring<Policy::STAGES> ring_;
  Ring<Policy::P_SLOTS> slots_;
  Item item_;
  int row_limit_[2];
  float maximum_[2];
  float sum_[2];
  uint32_t q_[Policy::Q_REGISTER_STEPS * 4];
};

}  // namespace mla::sm90
