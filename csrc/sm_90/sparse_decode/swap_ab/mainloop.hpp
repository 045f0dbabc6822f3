// A warpgroup that multiplies, of sparse decode with keys as the first operand. In a step it computes S^T = K Q^T of 64
// keys, their P, and O^T += V^T P^T. Keys are read as they are stored and dequantised in registers, for each product
// anew; P goes through shared memory. Warpgroups take turns at steps, and add their results up at the end (merge.hpp).
#pragma once

#include "sm_90/decode/convert_fp8.hpp"
#include "sm_90/decode/softmax.hpp"
#include "sm_90/ptx/wgmma_rs.hpp"
#include "sm_90/sparse_decode/swap_ab/merge.hpp"
#include "sm_90/sparse_decode/swap_ab/queries.hpp"

namespace mla::sm_90 {

template <class Traits, class Epilogue>
class SparseSwapAbMainloop {
  using Params = typename Traits::Params;
  using Storage = SharedStorage<Traits>;
  using Layout = SparseSwapAbLayout<Traits>;
  using State = SparseSwapAbState<Traits>;
  using Merge = SparseSwapAbMerge<Traits, Epilogue>;
  using KvState = PipelineState<Traits::STAGES>;
  static constexpr int S_REGS = Layout::S_REGS;
  static constexpr int LANE_ROWS = Layout::LANE_ROWS;
  static constexpr int TOKEN_BYTES = Traits::KvFormat::TOKEN_BYTES;
  static constexpr int GROUPS = Traits::GROUPS;
  static constexpr int TILES = State::TILES;
  // Steps of K Q^T, 16 deep, and tiles of V^T P^T that are dequantised and issued together. While such sets are
  // multiplied the next is dequantised. Four stored values of a key are of two tiles.
  static constexpr int BLOCK_STEPS = 4;
  static constexpr int SET_TILES = 2;
  static_assert(Traits::VT_TILES == SET_TILES, "K Q^T leaves its first step of every 64 columns to V^T P^T");
  static constexpr int VALUE_SETS = TILES / SET_TILES - 1;  // those of V^T P^T that are dequantised again

 public:
  MLA_DEVICE SparseSwapAbMainloop(const Params& params, uint32_t shared, int group)
      : params_(params),
        barriers_(shared),
        shared_(shared),
        group_(group),
        warp_(warp_uniform(warpgroup_thread() / 32)),
        scale_(fmaxf(params.softmax_scale * LOG2_E, MIN_SCALE)),
        vt_piece_(vt_at() + Layout::vt_piece(warp_)) {}

  MLA_DEVICE void run() {
    while (next_tile()) {
      one_tile();
      __syncwarp();
      mbarrier_arrive(barriers_.tile_empty(tiles_.stage));
      tiles_.next();
    }
  }

 private:
  // The tile stays in its slot until it is done.
  MLA_DEVICE bool next_tile() {
    mbarrier_wait(barriers_.tile_full(tiles_.stage), tiles_.parity);
    return ld_shared<int>(tile_at() + TILE_INFO) != END_OF_WORK;
  }
  MLA_DEVICE uint32_t tile_at() const { return shared_ + Storage::TILES + tiles_.stage * sizeof(PublishedTile); }
  MLA_DEVICE WorkTile tile() const { return published_tile(tile_at()); }

  MLA_DEVICE void one_tile() {
    const int keys = tile().keys(), steps = (keys + Traits::STEP_KEYS - 1) / Traits::STEP_KEYS;
    if (steps != 0) {
      mbarrier_wait(barriers_.q_full(), q_parity_);
      q_parity_ ^= 1;
      SparseSwapAbQueries<Traits>::arrange(shared_, group_, params_.heads);
    }
    state_.clear();
    const KvState first = kv_;
    kv_ = advanced(kv_, group_ * Traits::STEP_STAGES);
    KvState last = kv_;
#pragma unroll 1
    for (int step = group_; step < steps; step += GROUPS) {
      last = kv_;
      const bool keeps_stages = Merge::keeps_stages(group_) && step + GROUPS >= steps;
      one_step(keys - step * Traits::STEP_KEYS, keeps_stages);
      kv_ = advanced(kv_, GROUPS * Traits::STEP_STAGES);
    }
    if (steps != 0) {
      __syncwarp();
      mbarrier_arrive(barriers_.q_empty());
    }
    kv_ = advanced(first, steps * Traits::STEP_STAGES);
    Merge(params_, shared_, group_, warp_).finish(tile(), state_, steps, first, last);
  }

  // The next 64 of `keys`. Those behind the tile's end lie there as absent ones do, as zeros. With `keeps_stages` they
  // are released only when the results have been added up.
  MLA_DEVICE void one_step(int keys, bool keeps_stages) {
    float s[S_REGS];
    multiply_keys(s);
    float sum[LANE_ROWS];
    const bool outgrown = exponentiate(s, sum);
    fence_proxy_async();
    if (__builtin_expect(named_barrier_any<128>(PV_GROUP_BARRIER + group_, outgrown), 0)) {
      raise_max(s);
      exponentiate(s, sum);
      fence_proxy_async();
      named_barrier_sync<128>(PV_GROUP_BARRIER + group_);
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) state_.sum[i] += sum[i];
    multiply_values((keys + Traits::STAGE_KEYS - 1) / Traits::STAGE_KEYS, keeps_stages);
    p_stage_ ^= 1;
  }

  MLA_DEVICE uint32_t stage_at(const KvState& kv) const {
    return shared_ + Storage::KV + kv.stage * Traits::STAGE_BYTES;
  }

  // S^T of 64 keys: of each warp the 16 of one stage. Scores of absent keys become -inf.
  MLA_DEVICE void multiply_keys(float (&s)[S_REGS]) {
    const KvState kv = advanced(kv_, warp_);
    mbarrier_wait(barriers_.kv_full(kv.stage), kv.parity);
    // The first of this lane's two keys; the other is the next.
    const uint32_t key = stage_at(kv) + Layout::key_of_row(Layout::quad()) * TOKEN_BYTES;
    const uint32_t from = key + Layout::in_quad() * 16;
    const uint32_t vt_odd = (vt_piece_ ^ 64) + 4 * 128;  // of every second 64 columns
    const uint64_t q = make_descriptor(warp_uniform(shared_ + Storage::Q), 0, 1024, Swizzle::bytes128);
    constexpr int LATENT_BLOCKS = Traits::COLUMN_BLOCKS - 1;
    uint32_t stored[2][2][4];  // 64 bytes of the quad's two keys
    ld_shared_v4(from, stored[0][0]);
    ld_shared_v4(from + TOKEN_BYTES, stored[0][1]);
    float scale[2];
    uint32_t keys[2][BLOCK_STEPS][4];
#pragma unroll
    for (int c = 0; c < LATENT_BLOCKS; ++c) {
      if (c % 2 == 0)
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[i] = ld_shared<float>(key + i * TOKEN_BYTES + Traits::SCALES_AT + c / 2 * 4);
      const int next = c + 1 < LATENT_BLOCKS ? (c + 1) * 64 : Traits::ROPE_AT;
#pragma unroll
      for (int i = 0; i < 2; ++i) ld_shared_v4(from + next + i * TOKEN_BYTES, stored[(c + 1) % 2][i]);
      if (c >= 2) wgmma_wait<1>();
#pragma unroll
      for (int k = 0; k < BLOCK_STEPS; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float2 pairs[2];
          e4m3_four(stored[c % 2][i][k], pairs);
#pragma unroll
          for (int pair = 0; pair < 2; ++pair)
            keys[c % 2][k][i + pair * 2] = pack_pair<bf16>(pairs[pair].x * scale[i], pairs[pair].y * scale[i]);
        }
      if (c == 0) wait_for_vt();
      stmatrix_trans_x4((c % 2 == 0 ? vt_piece_ : vt_odd) + c / 2 * 2048, keys[c % 2][0]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_STEPS; ++k)
        mma_rs<bf16>(s, keys[c % 2][k], advance_descriptor(q, c * Traits::Q_BLOCK_BYTES + k * 32), c + k > 0);
      wgmma_commit();
    }
    // bf16 values: the 16 bytes that lie in `stored[0]` serve two steps, those 64 bytes further on another two.
#pragma unroll
    for (int i = 0; i < 2; ++i) ld_shared_v4(from + Traits::ROPE_AT + 64 + i * TOKEN_BYTES, stored[1][i]);
    const uint32_t present = ld_shared<uint32_t>(shared_ + Storage::PRESENT + kv.stage * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wgmma_wait<1>();
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          keys[half][k][i] = stored[half][i][2 * k];
          keys[half][k][i + 2] = stored[half][i][2 * k + 1];
        }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        mma_rs<bf16>(s, keys[half][k],
                     advance_descriptor(q, (Traits::COLUMN_BLOCKS - 1) * Traits::Q_BLOCK_BYTES + (half * 2 + k) * 32),
                     true);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin_accumulator(s);
    if (__builtin_expect(present != (1u << Traits::STAGE_KEYS) - 1, 0)) mask_absent(s, present);
  }

  MLA_DEVICE uint32_t vt_at() const { return shared_ + Storage::VT + group_ * Traits::VT_BYTES; }

  // Waits until all warps of this warpgroup have multiplied what the step before has left.
  MLA_DEVICE void wait_for_vt() {
    mbarrier_wait(barriers_.vt_empty(group_), vt_parity_ ^ 1);
    vt_parity_ ^= 1;
  }
  MLA_DEVICE void release_vt() const {
    __syncwarp();
    if (warpgroup_thread() % 32 == 0) mbarrier_arrive(barriers_.vt_empty(group_));
  }

  MLA_DEVICE static void mask_absent(float (&s)[S_REGS], uint32_t present) {
    const uint32_t mine = present >> Layout::key_of_row(Layout::quad());
#pragma unroll
    for (int i = 0; i < S_REGS; ++i)
      if ((mine >> i / 2 % 2 & 1) == 0) s[i] = -INFINITE;
  }

  // P to shared memory, and its sums over this lane's keys.
  MLA_DEVICE bool exponentiate(const float (&s)[S_REGS], float (&sum)[LANE_ROWS]) const {
    const auto scale_and_max = [&](int pair, float (&scale)[2], float (&max)[2]) {
      scale[0] = scale[1] = scale_;
      max[0] = state_.max[2 * pair];
      max[1] = state_.max[2 * pair + 1];
    };
    return Layout::template exponentiate<bf16>(s, [&] { return p_at() + warp_ * Traits::P_STEP_BYTES; }, scale_and_max, sum);
  }

  MLA_DEVICE uint32_t p_at() const {
    return shared_ + Storage::P + (group_ * Traits::P_STAGES + p_stage_) * Traits::P_BYTES;
  }

  // Raises this warpgroup's running max of every row to its largest score so far, and rescales O and the sums.
  MLA_DEVICE void raise_max(const float (&s)[S_REGS]) {
    const uint32_t of_warp = shared_ + Storage::OF_WARP + group_ * (4 * Traits::ROWS * 4);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      const float top = Layout::max_over_keys(fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]));
      if (Layout::quad() == 0) st_shared(of_warp + (warp_ * Traits::ROWS + Layout::row(i)) * 4, top);
    }
    named_barrier_sync<128>(PV_GROUP_BARRIER + group_);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      float top = -INFINITE;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp)
        top = fmaxf(top, ld_shared<float>(of_warp + (warp * Traits::ROWS + Layout::row(i)) * 4));
      const float raised = fmaxf(state_.max[i], top * scale_);
      state_.rescale(i, exp2_approx(state_.max[i] - raised));
      state_.max[i] = raised;
    }
  }

  // O^T += V^T P^T of the columns that K Q^T has left, of all 64 keys. Absent ones are zeros there.
  MLA_DEVICE void multiply_vt(uint64_t p) {
    const uint64_t vt = make_descriptor(warp_uniform(vt_at()), 0, 1024, Swizzle::bytes128);
    wgmma_fence();
#pragma unroll
    for (int stage = 0; stage < Traits::STEP_STAGES; ++stage)
#pragma unroll
      for (int i = 0; i < Traits::VT_TILES; ++i)
        mma_ss(state_.o[i], advance_descriptor(vt, i * Traits::VT_TILE_BYTES + stage * 32),
               advance_descriptor(p, stage * Traits::P_STEP_BYTES), true);
    wgmma_commit();
  }

  // O^T += V^T P^T, of the columns that are dequantised again only for stages that have keys. Every stage is then
  // released.
  MLA_DEVICE void multiply_values(int used, bool keeps_stages) {
    const uint64_t p = make_descriptor(warp_uniform(p_at()), Traits::ROWS / 8 * 128, 128, Swizzle::none);
#pragma unroll
    for (int i = 0; i < TILES; ++i) pin_accumulator(state_.o[i]);
    const int column = warp_ * 128 + Layout::quad() * 16;
    // The first two of this lane's keys; the others are the next of each.
    const int value_at[2] = {Layout::key_of_row(Layout::in_quad() * 2) * TOKEN_BYTES,
                             Layout::key_of_row(Layout::in_quad() * 2 + 1) * TOKEN_BYTES};
    uint32_t values[VALUE_SETS][SET_TILES][4];
    multiply_vt(p);
    KvState kv = kv_;
#pragma unroll 1
    for (int stage = 0; stage < min(used, Traits::STEP_STAGES); ++stage, kv.next()) {
      mbarrier_wait(barriers_.kv_full(kv.stage), kv.parity);
      const uint32_t from = stage_at(kv);
      uint32_t stored[4][4];  // 16 columns of the lane's keys: two neighbouring rows of P, then those 8 further on
      float scale[4];
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        const uint32_t at = from + value_at[key % 2] + key / 2 * TOKEN_BYTES;
        ld_shared_v4(at + column, stored[key]);
        scale[key] = ld_shared<float>(at + Traits::SCALES_AT + warp_ * 4);
      }
#pragma unroll
      for (int set = 0; set < VALUE_SETS; ++set) {
        wgmma_wait<VALUE_SETS - 1>();
#pragma unroll
        for (int half = 0; half < 2; ++half)
          four_columns(stored[half * 2][set + 1], stored[half * 2 + 1][set + 1], scale[half * 2], scale[half * 2 + 1],
                       values[set], half * 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SET_TILES; ++i)
          mma_rs<bf16>(state_.o[(set + 1) * SET_TILES + i], values[set][i],
                       advance_descriptor(p, stage * Traits::P_STEP_BYTES), true);
        wgmma_commit();
      }
      if (!keeps_stages) release(kv);
    }
    if (!keeps_stages)
      for (int stage = used; stage < Traits::STEP_STAGES; ++stage, kv.next()) release(kv);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILES; ++i) pin_accumulator(state_.o[i]);
    release_vt();
  }

  // This thread has read a stage.
  MLA_DEVICE void release(const KvState& kv) const {
    __syncwarp();
    mbarrier_arrive(barriers_.kv_empty(kv.stage));
  }

  // Four neighbouring columns of two keys, which are the words from `first` on of two tiles: of each column first the
  // one key, then the other.
  MLA_DEVICE static void four_columns(uint32_t a, uint32_t b, float scale_a, float scale_b,
                                      uint32_t (&tiles)[SET_TILES][4], int first) {
    float2 of_a[2], of_b[2];
    e4m3_four(a, of_a);
    e4m3_four(b, of_b);
#pragma unroll
    for (int i = 0; i < SET_TILES; ++i) {
      tiles[i][first] = pack_pair<bf16>(of_a[i].x * scale_a, of_b[i].x * scale_b);
      tiles[i][first + 1] = pack_pair<bf16>(of_a[i].y * scale_a, of_b[i].y * scale_b);
    }
  }

  const Params& params_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  int group_;
  int warp_;  // of the warpgroup
  float scale_;
  const uint32_t vt_piece_;  // where this lane leaves columns of V^T
  uint32_t q_parity_ = 0;
  uint32_t vt_parity_ = 0;
  int p_stage_ = 0;
  KvState kv_;
  PipelineState<Traits::TILE_STAGES> tiles_;
  State state_;
};

}  // namespace mla::sm_90
