// The QK warpgroup: S = Q K^T, online softmax, P to shared memory.
//
// The tensor cores take instructions of all warpgroups in turn, and those of P V are four times as long as those of Q
// K^T. So P V should run while this warpgroup computes the softmax, not while it multiplies: a P is published when the
// next stage's Q K^T is nearly done.
#pragma once

#include "common/split_keys.hpp"
#include "sm_90/decode/cluster/pair_lse_merge.hpp"
#include "sm_90/decode/descales.hpp"
#include "sm_90/decode/fold.hpp"
#include "sm_90/decode/max_logits.hpp"
#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/decode/q_as_stored.hpp"
#include "sm_90/decode/qk_rows.hpp"

namespace mla::sm_90 {

template <class Traits>
class QkSoftmax : QkRows<Traits> {
  using Base = QkRows<Traits>;
  using typename Base::Params;
  using Base::SELECTED, Base::params_, Base::scale_, Base::tile_, Base::present_, Base::row_scale_, Base::row_max_;
  using Base::row_sum_, Base::scale_of, Base::scale_of_values, Base::mask, Base::raise_row_max;
  using Element = typename Traits::Element;
  using Cluster = typename Traits::Cluster;
  using Storage = SharedStorage<Traits>;
  using MaxLogits = MaxLogitsOf<Traits>;
  using QOperand = QOperandOf<Traits>;
  // Few CTAs with windows or trees: a second copy of the product and of the mask would have to come from L2, too.
  static constexpr bool ONE_COPY = HAS_MASKS && Cluster::EXCHANGES_P;

 public:
  MLA_DEVICE QkSoftmax(const Params& params, uint32_t shared)
      : Base(params),
        barriers_(shared),
        shared_(shared),
        p_to_(p_fragment(warpgroup_thread())) {}

  MLA_DEVICE void run() {
    bool any = false, merged = false;
    for (; next_tile(); any = true) {
      // The producer has waited for the previous kernel, which may have written the factors.
      if constexpr (!SELECTED || Traits::HAS_KV_DESCALE)
        if (!any) scale_ = score_scale<Traits>(params_, scale_);
      merged = merges();
      one_tile();
    }
    // A tile that a cluster merges is the CTA's last, and its PV warpgroups expect no command behind it.
    if (!merged) publish_command(STOP);
    if constexpr (Cluster::EXCHANGES_P) wait_for_p_readers();
  }

 private:
  // Whether the cluster merges this tile with the peer's, and whether both are all of the sequence.
  MLA_DEVICE bool merges() const {
    if constexpr (Cluster::MERGES_LAST) return (info_ & MERGED_WITH_PEER) != 0;
    return Cluster::MERGES_SPLITS;
  }
  MLA_DEVICE bool merges_whole_sequence() const {
    if constexpr (Cluster::MERGES_LAST) return tile_.partial_row < 0;
    return params_.num_splits == Cluster::SPLITS;
  }
  // Whether the tile's queries are loaded even if it has no keys. Only ClusterReduceLast has another flag beside this
  // one.
  MLA_DEVICE bool has_queries() const {
    if constexpr (Cluster::MERGES_LAST) return (info_ & Q_LOADED) != 0;
    return info_ == Q_LOADED;
  }
  static constexpr bool MAY_MERGE = Cluster::MERGES_SPLITS || Cluster::MERGES_LAST;

  MLA_DEVICE bool next_tile() {
    mbarrier_wait(barriers_.tile_full(tiles_.stage), tiles_.parity);
    const uint32_t from = shared_ + Storage::TILES + tiles_.stage * sizeof(PublishedTile);
    int info;
    ld_shared_v4(from, tile_.sequence, tile_.length, tile_.first_key, tile_.end_key);
    ld_shared_v2(from + TILE_PARTIAL_ROW, tile_.partial_row, info);
    __syncwarp();
    mbarrier_arrive(barriers_.tile_empty(tiles_.stage));
    tiles_.next();
    tile_.sequence = warp_uniform(tile_.sequence);
    tile_.first_key = warp_uniform(tile_.first_key);
    tile_.end_key = warp_uniform(tile_.end_key);
    tile_.partial_row = warp_uniform(tile_.partial_row);
    info_ = warp_uniform(info);
    return info_ != END_OF_WORK;
  }

  // Takes this tile's queries from their two stages.
  MLA_DEVICE void load_q() {
    const QPlace place;
    const int box = Traits::q_box_bytes(params_);
    float power[2];
    this->find_key_limits();
    named_barrier_sync<128>(QK_BARRIER);  // the other warps' wgmma of the last tile read Q, too
    if constexpr (Traits::SCALES_Q) find_powers(box, power);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mbarrier_wait(barriers_.kv_full(kv_.stage), kv_.parity);
      q_.take(place, half, shared_ + Storage::KV + kv_.stage * Traits::STAGE_BYTES, box, shared_ + Storage::Q, power);
      if constexpr (!Cluster::SHARES_KV) release_q_stage(kv_.stage);
      kv_.next();
    }
    fence_proxy_async();
    named_barrier_sync<128>(QK_BARRIER);
    if constexpr (Cluster::SHARES_KV) release_q_behind_keys();
  }

  // A part of the tile's first keys comes from the peer, which has by then found the stages of its own queries empty. So
  // it has counted all arrivals of their last release before it gets those of this one.
  MLA_DEVICE void release_q_behind_keys() {
    mbarrier_wait(keys_full(), keys_parity());
    for (int back = 2; back > 0; --back)
      release_q_stage(kv_.stage < back ? kv_.stage + Traits::STAGES - back : kv_.stage - back);
  }

  // The powers of two of this thread's rows, and what their scores are then multiplied by.
  MLA_DEVICE void find_powers(int box, float (&power)[2]) {
    uint32_t stages[2];
    auto kv = kv_;
    for (uint32_t& stage : stages) {
      mbarrier_wait(barriers_.kv_full(kv.stage), kv.parity);
      stage = shared_ + Storage::KV + kv.stage * Traits::STAGE_BYTES;
      kv.next();
    }
    ScaledQueries::find_powers<Traits::Q_BOXES>(stages, box, power);
    for (int half = 0; half < 2; ++half) row_scale_[half] = nonzero_scale(scale_ * inverse_power(power[half]));
  }

  // Releases a Q stage. kv_empty expects the arrivals of the PV warpgroups, which never read Q: these 128 threads
  // arrive for them, twice where there are 256.
  MLA_DEVICE void release_q_stage(int stage) {
    __syncwarp();
    consumer_release<Traits>(barriers_.kv_empty(stage));
    if constexpr (!Cluster::EXCHANGES_P) consumer_release<Traits>(barriers_.kv_empty(stage));
  }

  MLA_DEVICE void skip_q_stage() {
    mbarrier_wait(barriers_.kv_full(kv_.stage), kv_.parity);
    release_q_stage(kv_.stage);
    kv_.next();
  }

  // S = Q K^T for the ring's next stage; `between(k)` is called after step k was issued.
  template <class Between>
  MLA_DEVICE void multiply(float (&s)[SCORES], const Between& between) {
    if (!stage_ready_) mbarrier_wait(keys_full(), keys_parity());
    if constexpr (Traits::LOAD != KvLoad::tma || Traits::ROTATES) fence_proxy_async();
    if constexpr (SELECTED) present_ = Traits::present(shared_, kv_.stage);
    const uint64_t keys = QOperand::keys(warp_uniform(keys_at()));
    const uint64_t q = QOperand::descriptor(shared_ + Storage::Q);
    const int stored = raw_.stage;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Traits::Q_STEPS; ++k) {
      q_.multiply(k, s, q, QOperand::key(keys, k));
      between(k);
    }
    wgmma_commit();
    kv_.next();
    if constexpr (Traits::SCORES_AS_STORED) raw_.next();
    stage_ready_ = mbarrier_test(keys_full(), keys_parity());
    wgmma_wait<0>();
    pin_accumulator(s);
    if constexpr (Traits::SCORES_AS_STORED) mbarrier_arrive(barriers_.raw_empty(stored));
  }

  // The stage of keys that comes next: one of the ring whose values PV multiplies, or of what is stored.
  MLA_DEVICE uint32_t keys_at() const {
    if constexpr (Traits::SCORES_AS_STORED)
      return shared_ + Storage::RAW + raw_.stage * Traits::RAW_STAGE_BYTES;
    else
      return shared_ + Storage::KV + kv_.stage * Traits::STAGE_BYTES;
  }
  MLA_DEVICE uint32_t keys_full() const {
    if constexpr (Traits::SCORES_AS_STORED)
      return barriers_.raw_full(raw_.stage);
    else
      return barriers_.kv_full(kv_.stage);
  }
  MLA_DEVICE uint32_t keys_parity() const { return Traits::SCORES_AS_STORED ? raw_.parity : kv_.parity; }

  // Softmax of the stage whose scores are in `s`: P, and what PV needs with it, goes to the next P stage. The tile's
  // last P is published at once; while it is multiplied, the reciprocal denominators go to the P stage after it.
  template <bool LAST_BLOCK>
  MLA_DEVICE void softmax_step(float (&s)[SCORES], int first) {
    const int lane = warpgroup_thread() % 32;
    const int warp = warpgroup_thread() / 32;
    if constexpr (!ONE_COPY) mask(s, first);
    const bool p_ready = mbarrier_test(barriers_.p_empty(p_.stage), p_.parity ^ 1);
    const uint32_t stage = p_stage();
    const uint32_t row = stage + (warp * 16 + lane / 4) * 4;
    int command = MULTIPLY | (LAST_BLOCK ? LAST : 0);
    if constexpr (LAST_BLOCK && Cluster::MERGES_LAST) command |= merges() ? MERGE : 0;
    uint32_t p[SCORES / 2];
    float sum[2];
    exponentiate<Element>(s, scale_of(0), scale_of(1), row_max_, p, sum);
    MaxLogits::add(shared_, s);
    const bool outgrown = sum[0] > RESCALE_THRESHOLD || sum[1] > RESCALE_THRESHOLD;
    if (__builtin_expect(__any_sync(~0u, outgrown), 0)) {
      command |= RESCALE;
      float factor[2];
      raise_row_max(s, factor);
      exponentiate<Element>(s, scale_of(0), scale_of(1), row_max_, p, sum);
      mbarrier_wait(barriers_.p_empty(p_.stage), p_.parity ^ 1);
      if (lane % 4 == 0) {
        st_shared(row + Storage::P_FACTOR, factor[0]);
        st_shared(row + Storage::P_FACTOR + 32, factor[1]);
      }
    }
    row_sum_[0] += sum[0];
    row_sum_[1] += sum[1];
    if (!p_ready) mbarrier_wait(barriers_.p_empty(p_.stage), p_.parity ^ 1);
    const uint32_t to = stage + p_to_;
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k)
      stmatrix_x4(to + k * 2048, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]);
    if constexpr (LAST_BLOCK && Traits::LOAD == KvLoad::tma)
      clear_values(stage_multiplied_last(), tile_.end_key - first, BLOCK_N);
    if constexpr (LAST_BLOCK && Cluster::EXCHANGES_P)
      if (p_to_ == 0) st_shared(stage + Storage::P_KEYS_LEFT, tile_.end_key - first);
    write_command(command);
    if constexpr (LAST_BLOCK) {
      publish_p();
      finish_tile(first);
    }
  }

  // Of a stage of keys that begins at `first`, and is the last.
  MLA_DEVICE void finish_tile(int first) {
    if constexpr (MAY_MERGE)
      if (merges())
        return pair_lse_merge<Traits>(params_, shared_, row_max_, {quad_sum(row_sum_[0]), quad_sum(row_sum_[1])},
                                      scale_of_values(), merges_whole_sequence());
    float inverse[2];
    float lse[2];
    this->finish_rows(inverse, lse);
    const uint32_t row = p_stage() + quad_row() * 4;
    mbarrier_wait(barriers_.p_empty(p_.stage), p_.parity ^ 1);
    if constexpr (Traits::FOLDS) {
      folds_.add(row, inverse, lse);
      if (is_state(params_, tile_.partial_row >= 0)) {
        inverse[0] = inverse[1] = 1.0f;
        if (first + BLOCK_N >= tile_.end_key) folds_.store(params_, tile_.partial_row);
      }
    }
    if (warpgroup_thread() % 4 == 0) {
      st_shared(row + Storage::P_INVERSE, inverse[0]);
      st_shared(row + Storage::P_INVERSE + 32, inverse[1]);
      st_shared(row + Storage::P_LSE, lse[0]);
      st_shared(row + Storage::P_LSE + 32, lse[1]);
    }
    MaxLogits::publish(params_, shared_, p_stage());
    int command = FINISH;
    if constexpr (Traits::FOLDS) {
      command |= first - tile_.first_key < keys_of_split() ? 0 : FOLDED;
      command |= first + BLOCK_N < tile_.end_key ? GOES_ON : 0;
    }
    write_command(command);
    publish_p();
  }

  // Whether this is lane 0, which stores the first of its warp's 16 rows of 32 bytes.
  MLA_DEVICE bool leads_warp() const { return p_to_ % 512 == 0; }

  MLA_DEVICE void write_command(int command) {
    const uint32_t stage = p_stage();
    if (leads_warp()) st_shared(stage + Storage::P_COMMAND + p_to_ / 512 * 4, command);
    if ((command & (LAST | FINISH)) && p_to_ == 0) {
      st_shared(stage + Storage::P_SEQUENCE, tile_.sequence);
      st_shared(stage + Storage::P_PARTIAL_ROW, tile_.partial_row);
    }
    if constexpr (Cluster::EXCHANGES_P) mbarrier_arrive(Cluster::p_written(barriers_, p_.stage));
  }

  // Publishes the P stage to the PV warpgroups.
  MLA_DEVICE void publish_p() {
    __syncwarp();
    mbarrier_arrive(barriers_.p_full(p_.stage));
    p_.next();
  }

  // Publishes a command without P. A tile without keys has out 0 and lse -inf.
  MLA_DEVICE void publish_command(int command) {
    mbarrier_wait(barriers_.p_empty(p_.stage), p_.parity ^ 1);
    if (warpgroup_thread() < BLOCK_M) {
      st_shared(p_stage() + Storage::P_INVERSE + warpgroup_thread() * 4, 0.0f);
      st_shared(p_stage() + Storage::P_LSE + warpgroup_thread() * 4, -INFINITE);
    }
    MaxLogits::publish_none(p_stage());
    named_barrier_sync<128>(QK_BARRIER);  // a PV warp waits for all four warps, but reads rows that another one wrote
    write_command(command);
    publish_p();
    if constexpr (MAY_MERGE)
      if ((command & FINISH) && merges())
        pair_lse_merge<Traits>(params_, shared_, {LOWEST, LOWEST}, {0.0f, 0.0f}, scale_of_values(),
                               merges_whole_sequence());
  }

  // Waits until every P is read, here and by the peer; then the CTA may end.
  MLA_DEVICE void wait_for_p_readers() {
    for (int i = 0; i < Traits::P_STAGES; ++i, p_.next())
      mbarrier_wait(barriers_.p_empty(p_.stage), p_.parity ^ 1);
  }

  MLA_DEVICE uint32_t p_stage() const { return shared_ + Storage::P + p_.stage * sizeof(PStage); }

  MLA_DEVICE int stage_multiplied_last() const { return (kv_.stage == 0 ? Traits::STAGES : kv_.stage) - 1; }

  // Zeros the values of keys first..end - 1 of a stage, which are not the tile's: their P is 0, but what lies there may
  // be NaN. Their scores are masked, so a warp that reads them as keys before or after does no harm.
  MLA_DEVICE void clear_values(int stage, int first, int end) {
    clear_keys<Traits, Traits::HEAD_DIM_V>(shared_ + Storage::KV + stage * Traits::STAGE_BYTES, first, end);
  }

  MLA_DEVICE void one_tile() {
    row_max_[0] = row_max_[1] = LOWEST;
    row_sum_[0] = row_sum_[1] = 0.0f;
    MaxLogits::begin_tile(shared_);
    if (tile_.keys() == 0) {
      if (has_queries()) {
        skip_q_stage();
        skip_q_stage();
      }
      int command = FINISH | (has_queries() ? Q_PASSED : 0);
      if constexpr (Cluster::MERGES_LAST) command |= merges() ? MERGE : 0;
      if constexpr (Traits::FOLDS)
        if (is_state(params_, tile_.partial_row >= 0)) RowFolds().store(params_, tile_.partial_row);
      publish_command(command);
      return;
    }
    load_q();
    if constexpr (Traits::FOLDS) return fold_splits();
    const int first = tile_.template first_stage<Traits::SPLIT_ALIGNMENT>();
    if constexpr (HAS_MASKS && Traits::SPLIT_ALIGNMENT > 1)
      if (first < tile_.first_key) {  // here, because scores take registers
        mbarrier_wait(barriers_.kv_full(kv_.stage), kv_.parity);
        clear_values(kv_.stage, 0, tile_.first_key - first);
      }
    attend(first, tile_.end_key);
    stage_ready_ = false;
  }

  // The splits of a work tile that is a node, each as if it were the tile, but for the queries.
  MLA_DEVICE void fold_splits() {
    folds_ = RowFolds();
    const int keys = keys_of_split();
    for (int first = tile_.first_key; first < tile_.end_key;) {
      const int end = min(first + keys, tile_.end_key);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row_max_[half] != INFINITE) row_max_[half] = LOWEST;  // a row without a query stays one
        row_sum_[half] = 0.0f;
      }
      first = attend(first, end);
    }
    stage_ready_ = false;
  }

  // The keys of a split that is folded. A final tile is divided by the sink once, so with one it is not split: it has
  // several only where a plan is older than its sequence's length.
  MLA_DEVICE int keys_of_split() const {
    if (tile_.partial_row < 0 && params_.attn_sink != nullptr) return tile_.keys();
    return split_keys(params_.fold_size, tile_.length);
  }

  // All stages of the tile, or of one of its splits, from key `first` to `end`, with rows that have seen no key. Returns
  // where the next stage begins.
  MLA_DEVICE int attend(int first, int end) {
    if constexpr (ONE_COPY) return attend_in_one_loop(first, end);
    float s[SCORES];
    multiply(s, [](int) {});
    mask(s, first);
    float factor[2];
    raise_row_max(s, factor);  // there is no O yet that `factor` would apply to
    for (; first + BLOCK_N < end; first += BLOCK_N) {
      softmax_step<false>(s, first);
      multiply(s, [&](int k) {
        if (k == Traits::P_COMMIT_STEP) publish_p();
      });
    }
    softmax_step<true>(s, first);
    return first + BLOCK_N;
  }

  // The same with one copy of the product and of the mask.
  MLA_DEVICE int attend_in_one_loop(int first, int end) {
    float s[SCORES];
    for (bool begun = false;; first += BLOCK_N) {
      multiply(s, [&](int k) {
        if (k == Traits::P_COMMIT_STEP && begun) publish_p();
      });
      mask(s, first);
      if (!begun) {
        float factor[2];
        raise_row_max(s, factor);
        begun = true;
      }
      if (first + BLOCK_N >= end) break;
      softmax_step<false>(s, first);
    }
    softmax_step<true>(s, first);
    return first + BLOCK_N;
  }

  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  uint32_t p_to_;             // where this lane's row of P goes in a P stage
  bool stage_ready_ = false;  // the next KV stage was seen to be full
  PipelineState<Traits::STAGES> kv_;
  PipelineState<Traits::P_STAGES> p_;
  PipelineState<Traits::TILE_STAGES> tiles_;
  int info_;          // TileInfo of the tile
  PipelineState<Traits::RAW_STAGES> raw_;  // used only with SCORES_AS_STORED
  QOperand q_;
  RowFolds folds_;  // used only with FOLDS
};

}  // namespace mla::sm_90
