// The warpgroup that makes scores and probabilities: S = Q K^T, online softmax, P to shared memory.
//
// The tensor cores take instructions of all warpgroups in turn, and those of P V are four times as long as those of Q
// K^T. So P V should run while this warpgroup computes probabilities, not while it multiplies: a P is handed over when
// the next stage's Q K^T is nearly done.
//
// The reference that is subtracted from a row's scores moves only when a thread's probabilities of a stage sum to more
// than 2^8. Until then they may exceed 1, which costs nothing in a floating-point format, and no maximum is computed
// and the 64 x 512 result is not rescaled.
#pragma once

#include "sm_90/cluster.hpp"
#include "sm_90/loader.hpp"
#include "sm_90/quad.hpp"
#include "sm_90/two_cuts.hpp"

namespace mla::sm90 {

constexpr float MOST_PROBABILITY = 256.0f;  // summed over a thread's keys of a row
constexpr float LOWEST = -1e38f;            // the reference of a row that has seen no key

template <class Policy>
class Scores {
  using T = typename Policy::Type;
  using Params = typename Policy::Params;
  static constexpr int REGS = Policy::KEYS / 2;
  static constexpr bool SELECTED = Policy::SOURCE == Source::selected;

 public:
  MLA_DEVICE Scores(const Params& params, uint32_t shared)
      : params_(params),
        barriers_(shared),
        shared_(shared),
        scale_(params.softmax_scale * LOG2E),
        p_to_(p_fragment(group_thread())) {}

  MLA_DEVICE void run() {
    bool any = false;
    for (; next_item(); any = true) one_item();
    // Blocks that have two cuts together have one item, or none, and their values await no order behind it.
    if (!Policy::TWO_CUTS || !any) order_only(STOP);
    if constexpr (Policy::SIDES) await_slots();
  }

 private:
  MLA_DEVICE bool next_item() {
    barrier_wait(barriers_.item_full(items_.stage), items_.parity);
    const uint32_t from = shared_ + Policy::ITEM_OFFSET + items_.stage * 32;
    int what;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item_.sequence), "=r"(item_.length), "=r"(item_.first), "=r"(item_.end)
                 : "r"(from)
                 : "memory");
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(item_.partial_row), "=r"(what) : "r"(from + 16) : "memory");
    __syncwarp();
    barrier_arrive(barriers_.item_empty(items_.stage));
    items_.next();
    item_.sequence = uniform(item_.sequence);
    item_.first = uniform(item_.first);
    item_.end = uniform(item_.end);
    item_.partial_row = uniform(item_.partial_row);
    told_ = uniform(what);
    return told_ != OVER;
  }

  // Takes this item's queries from their two stages: the first steps of Q K^T read them from shared memory, swizzled as
  // they came, the others from registers.
  MLA_DEVICE void load_q() {
    const int lane = group_thread() % 32;
    const int warp = group_thread() / 32;
    const int row = warp * 16 + lane % 16;
    const uint32_t piece = lane / 16 ^ (row / 2 & 3);  // where the swizzle puts the lane's 16 bytes of an even step
    const int box = Policy::q_box_bytes(params_);
    constexpr int HALF = Policy::Q_STEPS / 2;
    find_limits();
    group_sync(SCORES_BARRIER);  // the other warps' wgmma of the last item read Q too
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
      const uint32_t stage = shared_ + Policy::KV_OFFSET + ring_.stage * Policy::STAGE_BYTES;
#pragma unroll
      for (int k = half * HALF; k < half * HALF + HALF; ++k) {
        const uint32_t from = stage + k % HALF / 2 * box;
        // Two steps make a box. It is copied in two pieces of 2 KiB, however much of it has rows.
        if (k < Policy::Q_SHARED_STEPS)
          copy_q(k * 2048 + group_thread() * 16, from + k % 2 * 2048 + group_thread() * 16);
        else
          load_q_step(k - Policy::Q_SHARED_STEPS, from + row * 64 + (piece ^ k % HALF % 2 * 2) * 16);
      }
      release_q_stage();
    }
    fence_async();
    group_sync(SCORES_BARRIER);
  }

  // How many keys this thread's rows see.
  MLA_DEVICE void find_limits() {
    const Queries queries(params_, item_.sequence);
    const Heads heads(params_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row(heads, queries, first_row() + quad_row() + half * 8);
      if constexpr (!SELECTED) row_limit_[half] = row.limit(params_, queries, item_);
      // Data in rows without a query may not move the references of rows that have one.
      if (!row.valid) reference_[half] = INFINITE;
    }
    if constexpr (!SELECTED) all_see_ = Row(heads, queries, 0).limit(params_, queries, item_);
  }

  // 16 bytes of queries from a stage to where Q K^T reads them, at `at`.
  MLA_DEVICE void copy_q(uint32_t at, uint32_t from) {
    uint32_t a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from));
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared_ + Policy::Q_OFFSET + at), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
  }

  MLA_DEVICE void load_q_step(int k, uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q_[4 * k]), "=r"(q_[4 * k + 1]), "=r"(q_[4 * k + 2]), "=r"(q_[4 * k + 3])
                 : "r"(from)
                 : "memory");
  }

  // Gives back a stage of queries: its four warps arrive for the values warps, which do not read it, twice for eight.
  MLA_DEVICE void release_q_stage() {
    __syncwarp();
    warp_release<Policy>(barriers_.kv_empty(ring_.stage));
    if constexpr (!Policy::SIDES) warp_release<Policy>(barriers_.kv_empty(ring_.stage));
    ring_.next();
  }

  MLA_DEVICE void pass_q_stage() {
    barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
    release_q_stage();
  }

  // S = Q K^T for the ring's next stage; `between(k)` is called after step k was issued.
  template <class Between>
  MLA_DEVICE void multiply(float (&s)[REGS], const Between& between) {
    if (!stage_ready_) barrier_wait(barriers_.kv_full(ring_.stage), ring_.parity);
    if constexpr (Policy::SOURCE != Source::tma) fence_async();
    if constexpr (SELECTED) present_ = Policy::present(shared_, ring_.stage);
    const uint32_t stage = uniform(shared_ + Policy::KV_OFFSET + ring_.stage * Policy::STAGE_BYTES);
    const uint64_t keys = operand(stage, 0, Policy::GROUP_BYTES, Swizzle::bytes128);
    // Opaque: else the compiler would keep the descriptors in registers that it does not have.
    uint32_t q_address = shared_ + Policy::Q_OFFSET;
    asm volatile("" : "+r"(q_address));
    const uint64_t q = operand(uniform(q_address), 0, 512, Swizzle::bytes64);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Policy::Q_STEPS; ++k) {
      const uint64_t key = advance(keys, k / 4 * Policy::BLOCK_BYTES + k % 4 * 32);
      if (k < Policy::Q_SHARED_STEPS)
        scores_mma<T>(s, advance(q, k / 2 * Policy::Q_BOX_BYTES + k % 2 * 32), key, k > 0);
      else
        scores_mma<T>(s, &q_[4 * (k - Policy::Q_SHARED_STEPS)], key, true);
      between(k);
    }
    wgmma_commit();
    ring_.next();
    stage_ready_ = barrier_test(barriers_.kv_full(ring_.stage), ring_.parity);
    wgmma_wait<0>();
    pin(s);
  }

  // Softmax of the stage whose scores are in `s`: P, and what the values need with it, goes to the next slot. The
  // item's last P is handed over at once; while it is multiplied, the reciprocal denominators go to the slot after.
  template <bool LAST_BLOCK>
  MLA_DEVICE void step(float (&s)[REGS], int first) {
    const int lane = group_thread() % 32;
    const int warp = group_thread() / 32;
    mask(s, first);
    const bool slot_ready = barrier_test(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    const uint32_t slot = this->slot();
    const uint32_t row = slot + (warp * 16 + lane / 4) * 4;
    int order = MULTIPLY | (LAST_BLOCK ? LAST : 0);
    uint32_t p[REGS / 2];
    float sum[2];
    exponentiate(s, p, sum);
    const bool outgrown = sum[0] > MOST_PROBABILITY || sum[1] > MOST_PROBABILITY;
    if (__builtin_expect(__any_sync(~0u, outgrown), 0)) {
      order |= RESCALE;
      float factor[2];
      move_references(s, factor);
      exponentiate(s, p, sum);
      barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
      if (lane % 4 == 0) {
        store_shared(row + Policy::FACTOR, factor[0]);
        store_shared(row + Policy::FACTOR + 32, factor[1]);
      }
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    if (!slot_ready) barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    const uint32_t to = slot + p_to_;
#pragma unroll
    for (int k = 0; k < Policy::KEYS / 16; ++k)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + k * 2048),
                   "r"(p[4 * k]), "r"(p[4 * k + 1]), "r"(p[4 * k + 2]), "r"(p[4 * k + 3])
                   : "memory");
    if constexpr (LAST_BLOCK && Policy::SOURCE == Source::tma) clear_from(item_.end - first);
    if constexpr (LAST_BLOCK && Policy::SIDES)
      if (p_to_ == 0) store_shared(slot + Policy::KEYS_LEFT, item_.end - first);
    write_order(order);
    if constexpr (LAST_BLOCK) {
      hand_over();
      finish_item();
    }
  }

  MLA_DEVICE void finish_item() {
    if constexpr (Policy::TWO_CUTS)
      return weigh_cuts<Policy>(params_, shared_, reference_, {quad_sum(sum_[0]), quad_sum(sum_[1])});
    float inverse[2];
    float lse[2];
    finish_rows(inverse, lse);
    const uint32_t row = slot() + quad_row() * 4;
    barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    if (group_thread() % 4 == 0) {
      store_shared(row + Policy::INVERSE, inverse[0]);
      store_shared(row + Policy::INVERSE + 32, inverse[1]);
      store_shared(row + Policy::LSE, lse[0]);
      store_shared(row + Policy::LSE + 32, lse[1]);
    }
    write_order(FINISH);
    hand_over();
  }

  // Scores of keys that a row does not see become -inf.
  MLA_DEVICE void mask(float (&s)[REGS], int first) {
    if constexpr (SELECTED) {
      keep_selected(s);
    } else if (__builtin_expect(first + Policy::KEYS > all_see_, 0)) {
#pragma unroll
      for (int i = 0; i < REGS; ++i) {
        const int key = first + i / 4 * 8 + group_thread() % 4 * 2 + i % 2;
        if (key >= row_limit_[i / 2 % 2]) s[i] = -INFINITE;
      }
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

  // Scores to probabilities, packed, and their sum for each row.
  MLA_DEVICE void exponentiate(const float (&s)[REGS], uint32_t (&p)[REGS / 2], float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < REGS / 2; ++i) {
      const float a = exp2_fast(fmaf(s[2 * i], scale_, -reference_[i % 2]));
      const float b = exp2_fast(fmaf(s[2 * i + 1], scale_, -reference_[i % 2]));
      sum[i % 2] = i < 2 ? a + b : sum[i % 2] + (a + b);
      p[i] = pack<T>(a, b);
    }
  }

  // Moves the references of this warp's rows to their largest scores so far; earlier results are then to
  // be multiplied by `factor`.
  MLA_DEVICE void move_references(const float (&s)[REGS], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITE;
#pragma unroll
      for (int i = 0; i < REGS; ++i)
        if (i / 2 % 2 == half) top = fmaxf(top, s[i]);
      const float higher = fmaxf(reference_[half], quad_max(top) * scale_);
      factor[half] = exp2_fast(reference_[half] - higher);
      reference_[half] = higher;
      sum_[half] *= factor[half];
    }
  }

  MLA_DEVICE bool leads() const { return p_to_ % 512 == 0; }  // of a warp's 16 rows of 32 bytes, lane 0 has the first

  MLA_DEVICE void write_order(int order) {
    const uint32_t slot = this->slot();
    if (leads()) store_shared(slot + Policy::ORDER + p_to_ / 512 * 4, order);
    if ((order & (LAST | FINISH)) && p_to_ == 0) {
      store_shared(slot + Policy::ITEM, item_.sequence);
      store_shared(slot + Policy::ITEM + 4, item_.partial_row);
    }
    if constexpr (Policy::SIDES) barrier_arrive(barriers_.p_written(slots_.stage));
  }

  // Hands the slot to the values warpgroups.
  MLA_DEVICE void hand_over() {
    __syncwarp();
    barrier_arrive(barriers_.p_full(slots_.stage));
    slots_.next();
  }

  // Gives an order without P. An item without keys has out 0 and lse -inf.
  MLA_DEVICE void order_only(int order) {
    barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
    if (group_thread() < ROWS) {
      store_shared(slot() + Policy::INVERSE + group_thread() * 4, 0.0f);
      store_shared(slot() + Policy::LSE + group_thread() * 4, -INFINITE);
    }
    group_sync(SCORES_BARRIER);  // a values warp waits for all four, but reads rows that another one wrote
    write_order(order);
    hand_over();
    if constexpr (Policy::TWO_CUTS)
      if (order & FINISH) weigh_cuts<Policy>(params_, shared_, {LOWEST, LOWEST}, {0.0f, 0.0f});
  }

  // Until all P's are read, here and by the peer: then a block may end.
  MLA_DEVICE void await_slots() {
    for (int i = 0; i < Policy::P_SLOTS; ++i, slots_.next())
      barrier_wait(barriers_.p_empty(slots_.stage), slots_.parity ^ 1);
  }

  MLA_DEVICE uint32_t slot() const { return shared_ + Policy::P_OFFSET + slots_.stage * Policy::P_SLOT_BYTES; }

  // Zeros the values of keys past the item's end in the last stage: their probabilities are 0, but what the copy engine
  // found there may be NaN. These keys' scores are masked, so a warp that still reads them as keys does no harm.
  MLA_DEVICE void clear_from(int used) {
    const int stage = (ring_.stage == 0 ? Policy::STAGES : ring_.stage) - 1;
    clear_keys<Policy, D_V>(shared_ + Policy::KV_OFFSET + stage * Policy::STAGE_BYTES, used);
  }

  // 1 / denominator of this thread's rows, and their `lse` without the sink.
  MLA_DEVICE void finish_rows(float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sum_[half]);
      const bool any = sum != 0.0f;  // NaN included
      float denominator = sum;
      if (any && item_.partial_row < 0 && params_.attn_sink != nullptr)
        denominator += sink_part(params_, half, reference_[half]);
      inverse[half] = any ? __fdividef(1.0f, denominator) : 0.0f;
      lse[half] = lse_of_row(reference_[half], sum);
    }
  }

  MLA_DEVICE void one_item() {
    reference_[0] = reference_[1] = LOWEST;
    sum_[0] = sum_[1] = 0.0f;
    if (item_.keys() == 0) {
      if (told_ == WITH_QUERIES) {
        pass_q_stage();
        pass_q_stage();
      }
      order_only(FINISH | (told_ == WITH_QUERIES ? QUERIES : 0));
      return;
    }
    load_q();
    float s[REGS];
    multiply(s, [](int) {});
    int first = item_.first;
    mask(s, first);
    float factor[2];
    move_references(s, factor);  // there is no result yet that `factor` would apply to
    for (; first + Policy::KEYS < item_.end; first += Policy::KEYS) {
      step<false>(s, first);
      multiply(s, [&](int k) {
        if (k == Policy::HAND_OVER_STEP) hand_over();
      });
    }
    step<true>(s, first);
    stage_ready_ = false;
  }

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  float scale_;
  uint32_t p_to_;             // where this lane's row of P goes in a slot
  bool stage_ready_ = false;  // the next stage was seen to be full
  Ring<Policy::STAGES> ring_;
  Ring<Policy::P_SLOTS> slots_;
  Ring<Policy::ITEMS> items_;
  Item item_;
  int told_;
  int row_limit_[2];    // keys that this thread's rows see; like the next, unused where keys are selected
  int all_see_;         // keys that every row of the sequence sees
  uint32_t present_;    // used only there: a bit for each key of the stage whose scores come next
  float reference_[2];  // subtracted from the scores of this thread's rows, as exponents of two
  float sum_[2];
  uint32_t q_[Policy::Q_REGISTER_STEPS * 4];
};

}  // namespace mla::sm90
