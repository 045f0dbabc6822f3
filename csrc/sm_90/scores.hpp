// The warpgroup that makes scores and probabilities: S = Q K^T, online softmax, P to shared memory.
//
// A warp that issues wgmma is busy until the tensor cores have taken nearly all of it. So the softmax of a block is
// written between the instructions of the next block's Q K^T: its arithmetic runs while they run.
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

MLA_DEVICE uint32_t clock_now() {
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
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
  using Params = typename Policy::Params;
  static constexpr int REGS = Policy::KEYS / 2;
  static constexpr bool SELECTED = Policy::SOURCE == Source::selected;

 public:
  MLA_DEVICE Scores(const Params& params, uint32_t shared)
      : params_(params), barriers_(shared), shared_(shared), scale_(params.softmax_scale * LOG2E), nothing_(Policy::nothing(params)) {}

  MLA_DEVICE void run() {
    while (next_item()) one_item();
    order_only(STOP);
  }

 private:
  MLA_DEVICE bool next_item() {
    barrier_wait(barriers_.item_full(items_.stage), items_.parity);
    const uint32_t from = shared_ + Policy::ITEM_OFFSET + items_.stage * 32;
    int stop;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item_.sequence), "=r"(item_.length), "=r"(item_.first), "=r"(item_.end)
                 : "r"(from)
                 : "memory");
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(item_.partial_row), "=r"(stop) : "r"(from + 16) : "memory");
    __syncwarp();
    warp_arrive(barriers_.item_empty(items_.stage));
    items_.next();
    item_.sequence = uniform(item_.sequence);
    item_.first = uniform(item_.first);
    item_.end = uniform(item_.end);
    item_.partial_row = uniform(item_.partial_row);
    return uniform(stop) == 0;
  }

  // This item's queries from their two stages: the first half of the steps of Q K^T read them from shared memory, swizzled
  // as they came, the second half from registers.
  MLA_DEVICE void load_q() {
    const int lane = group_thread() % 32;
    const int warp = group_thread() / 32;
    const Queries queries(params_, item_.sequence);
    const Heads heads(params_);
    group_sync(SCORES_BARRIER);  // the other warps' wgmma of the last item read Q too
    uint32_t stage = next_q_stage();
#pragma unroll
    for (int i = 0; i < Policy::STAGE_BYTES / 2048; ++i) {
      const uint32_t at = i * 2048 + group_thread() * 16;
      uint32_t a, b, c, d;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(stage + at));
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared_ + Policy::Q_OFFSET + at), "r"(a), "r"(b), "r"(c),
                   "r"(d)
                   : "memory");
    }
    release_q_stage();
    stage = next_q_stage();
    const int row = warp * 16 + lane % 16;
    const uint32_t from = stage + row * 64;
    const uint32_t piece = lane / 16 ^ (row / 2 & 3);  // where the swizzle puts a lane's 16 bytes of an even step
#pragma unroll
    for (int k = 0; k < Policy::Q_REGISTER_STEPS; ++k)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(q_[4 * k]), "=r"(q_[4 * k + 1]), "=r"(q_[4 * k + 2]), "=r"(q_[4 * k + 3])
                   : "r"(from + k / 2 * Policy::Q_BOX_BYTES + (piece ^ k % 2 * 2) * 16)
                   : "memory");
    release_q_stage();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row(heads, queries, first_row() + warp * 16 + lane / 4 + half * 8);
      if constexpr (!SELECTED) row_limit_[half] = row.limit(params_, queries, item_);
      // What lies where a row has no query may not move the references of rows that have one.
      if (!row.valid) maximum_[half] = INFINITE;
    }
    fence_async();
    group_sync(SCORES_BARRIER);
  }

  MLA_DEVICE uint32_t next_q_stage() {
    barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
    return shared_ + Policy::KV_OFFSET + ring_.stage * Policy::STAGE_BYTES;
  }

  // In place of the eight values warps, which do not read this stage.
  MLA_DEVICE void release_q_stage() {
    __syncwarp();
    warp_arrive(barriers_.kv_empty(ring_.stage));
    warp_arrive(barriers_.kv_empty(ring_.stage));
    ring_.next();
  }

  // Starts S = Q K^T for the ring's next stage; `between(k)` is done after step k.
  template <class Between>
  MLA_DEVICE void start(float (&s)[REGS], const Between& between) {
    if (!stage_ready_) barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
    if constexpr (Policy::SOURCE == Source::gather) fence_async();
    if constexpr (SELECTED)
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(present_) : "r"(shared_ + Policy::PRESENT_OFFSET + ring_.stage * 4) : "memory");
    const uint32_t stage = uniform(shared_ + Policy::KV_OFFSET + ring_.stage * Policy::STAGE_BYTES);
    const uint64_t keys = operand(stage, 0, 1024, Swizzle::bytes128);
    // Opaque, or the compiler keeps the sixteen descriptors in registers that it does not have.
    uint32_t q_address = shared_ + Policy::Q_OFFSET;
    asm volatile("" : "+r"(q_address));
    const uint64_t q = operand(uniform(q_address), 0, 512, Swizzle::bytes64);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Policy::Q_STEPS; ++k) {
      const uint64_t key = advance(keys, k / 4 * Policy::BLOCK_BYTES + k % 4 * 32);
      if (k < Policy::Q_SHARED_STEPS) scores_mma<T>(s, advance(q, k / 2 * Policy::Q_BOX_BYTES + k % 2 * 32), key, k > 0);
      else scores_mma<T>(s, &q_[4 * (k - Policy::Q_SHARED_STEPS)], key, true);
      between(k);
    }
    wgmma_commit();
    ring_.next();
  }

  // Softmax of the block whose scores are in `s`; unless it is the item's last, Q K^T of the next block into `next`. The
  // two cases are two functions: a wgmma that runs across a condition is serialised by the compiler.
  template <bool LAST_BLOCK>
  MLA_DEVICE void step(float (&s)[REGS], float (&next)[REGS], int first) {
    const int lane = group_thread() % 32;
    if constexpr (SELECTED) {
      keep_selected(s);
    } else if (first + Policy::KEYS > row_limit_[0] || first + Policy::KEYS > row_limit_[1]) {
#pragma unroll
      for (int i = 0; i < REGS; ++i) {
        const int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (key >= row_limit_[i / 2 % 2]) s[i] = -INFINITE;
      }
    }
    slot_ready_ = barrier_test(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    // Probabilities against the reference maximum as it stands; thrown away in the rare case that it must move.
    uint32_t p[REGS / 2];
    float sum[2] = {0.0f, 0.0f};
    float top[2] = {-INFINITE, -INFINITE};
    const float offset[2] = {reference(0), reference(1)};
    if constexpr (LAST_BLOCK) {
#pragma unroll
      for (int i = 0; i < REGS / 2; ++i) exponentiate(s, i, offset, p, sum, top);
      pass_on<true>(s, first, p, sum, top);
    } else {
      // After every GAP of the first steps of Q K^T comes a part of the softmax, and the values can begin before the last
      // step has run.
      constexpr int PAIRS = REGS / 2 / SOFTMAX_PARTS;
      constexpr int GAP = SOFTMAX_GAP;
      constexpr int DONE = SOFTMAX_PARTS * GAP + 1;
      static_assert(DONE < Policy::Q_STEPS, "the softmax is shorter than Q K^T");
      uint32_t now = 0;
      start(next, [&](int k) {
        if (k < SOFTMAX_PARTS * GAP) {
          if (k % GAP == GAP / 2 - 1) now = clock_now();
          if (k % GAP != GAP - 1) return;
          const float here[2] = {not_before(now, offset[0]), not_before(now, offset[1])};
#pragma unroll
          for (int i = 0; i < PAIRS; ++i) exponentiate(s, k / GAP * PAIRS + i, here, p, sum, top);
        } else if (k == DONE) {
          pass_on<false>(s, first, p, sum, top);
        }
      });
      stage_ready_ = barrier_test(barriers_.kv_full(ring_.stage), ring_.parity);
      wgmma_wait<0>();
      pin(next);
    }
  }

  // Scores of keys that are not there become -inf, by the bits that came with the stage.
  MLA_DEVICE void keep_selected(float (&s)[REGS]) {
    if (present_ == ~0u) return;
    const uint32_t mine = present_ >> (group_thread() % 4 * 2);
#pragma unroll
    for (int i = 0; i < REGS; ++i)
      if ((mine >> (i / 4 * 8 + i % 2) & 1) == 0) s[i] = -INFINITE;
  }

  // Sums and probabilities are final, or made again if a reference must move; P to shared memory and handed over.
  template <bool LAST_BLOCK>
  MLA_DEVICE void pass_on(const float (&s)[REGS], int first, uint32_t (&p)[REGS / 2], float (&sum)[2], float (&top)[2]) {
    const int lane = group_thread() % 32;
    const int warp = group_thread() / 32;
    int order = MULTIPLY | (LAST_BLOCK ? LAST : 0);
    float factor[2] = {1.0f, 1.0f};
    const bool outgrown =
        (top[0] - maximum_[0]) * scale_ > MAX_GROWTH || (top[1] - maximum_[1]) * scale_ > MAX_GROWTH;
    if (__any_sync(~0u, outgrown)) {
      order |= RESCALE;
      move_maximum(top, factor);
      const float offset[2] = {reference(0), reference(1)};
      sum[0] = sum[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < REGS / 2; ++i) exponentiate(s, i, offset, p, sum, top);
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    float inverse[2] = {0.0f, 0.0f};
    float lse[2] = {-INFINITE, -INFINITE};
    if constexpr (LAST_BLOCK) {
      finish_rows(inverse, lse);
      if constexpr (Policy::SOURCE == Source::tma) clear_from(item_.end - first);
    }
    if (!slot_ready_) barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    const uint32_t slot = this->slot();
    const uint32_t to = slot + p_fragment(group_thread());
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
    if (LAST_BLOCK && lane % 4 == 0) {
      store_shared(row + Policy::INVERSE, inverse[0]);
      store_shared(row + Policy::INVERSE + 32, inverse[1]);
      store_shared(row + Policy::LSE, lse[0]);
      store_shared(row + Policy::LSE + 32, lse[1]);
    }
    write_order(order);
    hand_over();
  }

  // `value`, but only once the clock has been read: the assembler would gather the softmax before the first wgmma, where
  // nothing runs beside it. It moves no read of the clock over a wgmma, and does not know that the mask is 0.
  MLA_DEVICE float not_before(uint32_t now, float value) const {
    return bit_cast<float>(bit_cast<uint32_t>(value) ^ (now & nothing_));
  }

  // What is taken off a row's scores, in powers of two. A row that has seen no key yet has no maximum.
  MLA_DEVICE float reference(int half) const { return maximum_[half] == -INFINITE ? 0.0f : maximum_[half] * scale_; }

  // Scores 2i and 2i + 1 to probabilities, packed and summed; `top` is the largest score of each row.
  MLA_DEVICE void exponentiate(const float (&s)[REGS], int i, const float (&offset)[2], uint32_t (&p)[REGS / 2],
                               float (&sum)[2], float (&top)[2]) {
    const float a = exp2_fast(fmaf(s[2 * i], scale_, -offset[i % 2]));
    const float b = exp2_fast(fmaf(s[2 * i + 1], scale_, -offset[i % 2]));
    sum[i % 2] += a + b;
    top[i % 2] = fmaxf(top[i % 2], fmaxf(s[2 * i], s[2 * i + 1]));
    p[i] = pack<T>(a, b);
  }

  // The references of this warp's rows move to their largest scores so far; `factor` is what that is worth.
  MLA_DEVICE void move_maximum(const float (&top)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float higher = fmaxf(maximum_[half], quad_max(top[half]));
      if (higher != -INFINITE) factor[half] = exp2_fast((maximum_[half] - higher) * scale_);
      maximum_[half] = higher;
      sum_[half] *= factor[half];
    }
  }

  MLA_DEVICE void write_order(int order) {
    const uint32_t slot = this->slot();
    if (group_thread() % 32 == 0) store_shared(slot + Policy::ORDER + group_thread() / 32 * 4, order);
    if (group_thread() == 0 && (order & LAST)) {
      store_shared(slot + Policy::ITEM, item_.sequence);
      store_shared(slot + Policy::ITEM + 4, item_.partial_row);
    }
  }

  // The slot is the values warpgroups' from here on.
  MLA_DEVICE void hand_over() {
    __syncwarp();
    warp_arrive(barriers_.p_full(slots_.stage));
    slots_.next();
  }

  // An order without P. An item without keys has out 0 and lse -inf.
  MLA_DEVICE void order_only(int order) {
    barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    if (group_thread() < ROWS) {
      store_shared(slot() + Policy::INVERSE + group_thread() * 4, 0.0f);
      store_shared(slot() + Policy::LSE + group_thread() * 4, -INFINITE);
    }
    group_sync(SCORES_BARRIER);  // a values warp waits for all four, but reads rows that another one wrote
    write_order(order);
    hand_over();
  }

  MLA_DEVICE uint32_t slot() const { return shared_ + Policy::P_OFFSET + slots_.stage * Policy::P_SLOT_BYTES; }

  // Zeros for the values of keys past the item's end in the last stage: their probabilities are 0, but what the copy
  // engine found there may be NaN. The keys' scores were masked, so a warp still reading them does no harm.
  MLA_DEVICE void clear_from(int used) {
    const int stage = (ring_.stage == 0 ? Policy::STAGES : ring_.stage) - 1;
    const uint32_t base = shared_ + Policy::KV_OFFSET + stage * Policy::STAGE_BYTES;
    for (int i = used * 64 + group_thread(); i < Policy::KEYS * 64; i += 128) {
      const uint32_t to = base + i % 64 / 8 * Policy::BLOCK_BYTES + i / 64 * 128 + i % 8 * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    fence_async();
  }

  // 1 / denominator of this thread's rows; `lse` is theirs without the sink.
  MLA_DEVICE void finish_rows(float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sum_[half]);
      const bool any = sum != 0.0f;  // NaN included
      float denominator = sum;
      if (any && item_.partial_row < 0 && params_.attn_sink != nullptr) {
        const int row = first_row() + group_thread() / 32 * 16 + group_thread() % 32 / 4 + half * 8;
        const float sink = __ldg(params_.attn_sink + row % params_.heads);
        denominator += exp2_fast(sink * LOG2E - maximum_[half] * scale_);
      }
      inverse[half] = any ? __fdividef(1.0f, denominator) : 0.0f;
      lse[half] = any ? (maximum_[half] * scale_ + __log2f(sum)) * LN2 : -INFINITE;
    }
  }

  MLA_DEVICE void one_item() {
    maximum_[0] = maximum_[1] = -INFINITE;
    sum_[0] = sum_[1] = 0.0f;
    if (item_.keys() == 0) {
      order_only(LAST);
      return;
    }
    load_q();
    float even[REGS], odd[REGS];
    start(even, [](int) {});
    wgmma_wait<0>();
    pin(even);
    for (int first = item_.first;;) {
      if (first + Policy::KEYS >= item_.end) {
        step<true>(even, odd, first);
        break;
      }
      step<false>(even, odd, first);
      first += Policy::KEYS;
      if (first + Policy::KEYS >= item_.end) {
        step<true>(odd, even, first);
        break;
      }
      step<false>(odd, even, first);
      first += Policy::KEYS;
    }
    stage_ready_ = false;
  }

  MLA_DEVICE int first_row() const { return blockIdx.x % params_.row_tiles * ROWS; }

  template <class V>
  MLA_DEVICE void store_shared(uint32_t to, V value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bit_cast<uint32_t>(value)) : "memory");
  }

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  float scale_;
  uint32_t nothing_;            // 0
  bool stage_ready_ = false;  // the next stage was seen to be full
  bool slot_ready_ = false;   // the next slot was seen to be empty
  Ring<Policy::STAGES> ring_;
  Ring<Policy::P_SLOTS> slots_;
  Ring<Policy::ITEMS> items_;
  Item item_;
  int row_limit_[2];      // unused where keys are selected
  uint32_t present_;      // only there: a bit for each key of the stage whose scores come next
  float maximum_[2];
  float sum_[2];
  uint32_t q_[Policy::Q_REGISTER_STEPS * 4];
};

}  // namespace mla::sm90
