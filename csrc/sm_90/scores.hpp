// The warpgroup that makes scores and probabilities: S = Q K^T, online softmax, P to shared memory.
//
// A warp that issues wgmma is busy until the tensor cores have taken nearly all of it. So Q K^T and softmax of this
// warpgroup follow each other, and the values' P V should fill the softmax's time and not slow down Q K^T: a P is handed
// over only once the next Q K^T has been issued.
//
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
    order_only(STOP);
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
    if (!ready_) barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
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

  // Looks at the barriers that the next steps need while Q K^T still runs: an answer takes a hundred clocks.
  MLA_DEVICE void look_ahead() {
    barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    ready_ = barrier_test(barriers_.kv_full(ring_.stage), ring_.parity);
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
    // Probabilities against the reference maximum as it stands; thrown away in the rare case that it must move.
    uint32_t p[REGS / 2];
    float sum[2];
    exponentiate(s, p, sum);
    int order = MULTIPLY | (last ? LAST : 0);
    float factor[2] = {1.0f, 1.0f};
    if (__any_sync(~0u, outgrown(s))) {
      order |= RESCALE;
      move_maximum(s, factor);
      exponentiate(s, p, sum);
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    float inverse[2] = {0.0f, 0.0f};
    if (last) {
      finish_rows(inverse);
      if constexpr (Policy::SOURCE == Source::tma) clear_from(item_.end - first);
    }

    const uint32_t slot = this->slot();
    const int matrix = lane / 8;
    const uint32_t to = slot + (2 * warp + matrix % 2) * 256 + matrix / 2 * 128 + lane % 8 * 16;
#pragma unroll
    for (int k = 0; k < Policy::KEYS / 16; ++k)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + k * 2048),
                   "r"(p[4 * k]), "r"(p[4 * k + 1]), "r"(p[4 * k + 2]), "r"(p[4 * k + 3])
                   : "memory");
    const uint32_t row = slot + (warp * 16 + lane / 4) * 4;
    if ((order & RESCALE) && lane % 4 == 0) {
      store_shared(row + Policy::FACTOR, factor[0]);
      store_shared(row + Policy::FACTOR + 32, factor[1]);
    }
    if (last && lane % 4 == 0) {
      store_shared(row + Policy::INVERSE, inverse[0]);
      store_shared(row + Policy::INVERSE + 32, inverse[1]);
    }
    write_order(order);
  }

  // P = exp(s - maximum), packed, and this thread's sums of it. A row that has seen no key yet has no maximum.
  MLA_DEVICE void exponentiate(const float (&s)[REGS], uint32_t (&p)[REGS / 2], float (&sum)[2]) {
    const float offset[2] = {maximum_[0] == -INFINITE ? 0.0f : maximum_[0] * scale_,
                             maximum_[1] == -INFINITE ? 0.0f : maximum_[1] * scale_};
    float pairs[REGS / 2];
#pragma unroll
    for (int i = 0; i < REGS; i += 2) {
      const float a = exp2_fast(fmaf(s[i], scale_, -offset[i / 2 % 2]));
      const float b = exp2_fast(fmaf(s[i + 1], scale_, -offset[i / 2 % 2]));
      pairs[i / 2] = a + b;
      p[i / 2] = pack<T>(a, b);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = pairs[half], odd = pairs[half + 2];
#pragma unroll
      for (int i = 2; i < REGS / 4; i += 2) {
        even += pairs[2 * i + half];
        odd += pairs[2 * i + 2 + half];
      }
      sum[half] = even + odd;
    }
  }

  // Whether a score of this thread passes its row's reference by more than MAX_GROWTH.
  MLA_DEVICE bool outgrown(const float (&s)[REGS]) {
    const float top[2] = {largest<0>(s), largest<1>(s)};
    return (top[0] - maximum_[0]) * scale_ > MAX_GROWTH || (top[1] - maximum_[1]) * scale_ > MAX_GROWTH;
  }

  template <int HALF>
  MLA_DEVICE float largest(const float (&s)[REGS]) {
    float top[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = s[i / 2 * 4 + HALF * 2 + i % 2];
#pragma unroll
    for (int i = 4; i < REGS / 2; ++i) top[i % 4] = fmaxf(top[i % 4], s[i / 2 * 4 + HALF * 2 + i % 2]);
    return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
  }

  // The references of this warp's rows move to their largest scores so far; `factor` is what that is worth.
  MLA_DEVICE void move_maximum(const float (&s)[REGS], float (&factor)[2]) {
    const float top[2] = {quad_max(largest<0>(s)), quad_max(largest<1>(s))};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float higher = fmaxf(maximum_[half], top[half]);
      if (higher != -INFINITE) factor[half] = exp2_fast((maximum_[half] - higher) * scale_);
      maximum_[half] = higher;
      sum_[half] *= factor[half];
    }
  }

  MLA_DEVICE void write_order(int order) {
    const uint32_t slot = this->slot();
    if (thread_ % 32 == 0) store_shared(slot + Policy::ORDER + thread_ / 32 * 4, order);
    if (thread_ == 0 && (order & LAST)) {
      store_shared(slot + Policy::ITEM, item_.sequence);
      store_shared(slot + Policy::ITEM + 4, item_.partial_row);
    }
  }

  // The slot is the values warpgroups' from here on.
  MLA_DEVICE void hand_over() {
    fence_async();
    __syncwarp();
    if (thread_ % 32 == 0) barrier_arrive(barriers_.p_full(slots_.stage));
    slots_.next();
  }

  MLA_DEVICE void order_only(int order) {
    barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    write_order(order);
    hand_over();
  }

  MLA_DEVICE uint32_t slot() const { return shared_ + Policy::P_OFFSET + slots_.stage * Policy::P_SLOT_BYTES; }

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
      order_only(LAST);
      return;
    }
    load_q(item, Queries(params_, item.sequence));
    float s[REGS];
    start(s);
    for (int first = item.first;; first += Policy::KEYS) {
      look_ahead();
      wgmma_wait<0>();
      pin(s);
      const bool last = first + Policy::KEYS >= item.end;
      finish(s, first, last);
      if (last) break;
      start(s);
      hand_over();
    }
    hand_over();
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
  bool ready_ = false;  // the next stage was seen to be full
  Ring<Policy::STAGES> ring_;
  Ring<Policy::P_SLOTS> slots_;
  Item item_;
  int row_limit_[2];
  float maximum_[2];
  float sum_[2];
  uint32_t q_[Policy::Q_REGISTER_STEPS * 4];
};

}  // namespace mla::sm90
