// The warpgroup that multiplies, of sparse decode for few heads. In a step it computes S^T = K Q^T of a stage's 64 keys,
// their P, and O^T += V^T P^T. Both products read the keys where the producer has dequantised them; P goes through
// shared memory.
#pragma once

#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/decode/swap_ab/epilogue.hpp"
#include "sm_90/decode/swap_ab/lane_layout.hpp"
#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/wgmma_rs.hpp"
#include "sm_90/sparse_decode/few_heads/shared_storage.hpp"

namespace mla::sm_90 {

template <class Traits, class Epilogue>
class FewHeadsMainloop {
  using Params = typename Traits::Params;
  using Storage = SharedStorage<Traits>;
  using Layout = SwapAbLanes<Traits::ROWS>;
  static constexpr int ROWS = Traits::ROWS;
  static constexpr int S_REGS = Layout::S_REGS;
  static constexpr int LANE_ROWS = Layout::LANE_ROWS;
  static constexpr int TILES = Traits::TILES;

 public:
  MLA_DEVICE FewHeadsMainloop(const Params& params, uint32_t shared, int)
      : params_(params),
        barriers_(shared),
        shared_(shared),
        warp_(warp_uniform(warpgroup_thread() / 32)),
        scale_(fmaxf(params.softmax_scale * LOG2_E, MIN_SCALE)) {}

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
  MLA_DEVICE static void sync() { named_barrier_sync<128>(PV_GROUP_BARRIER); }

  MLA_DEVICE void one_tile() {
    const WorkTile tile = published_tile(tile_at());
    const int steps = (tile.keys() + Traits::STAGE_KEYS - 1) / Traits::STAGE_KEYS;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      max_[i] = LOWEST;
      sum_[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int r = 0; r < S_REGS; ++r) o_[i][r] = 0.0f;
    if (steps != 0) {
      mbarrier_wait(barriers_.q_full(), q_parity_);
      q_parity_ ^= 1;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      one_step();
      if (step + 1 < steps) release();
    }
    if (steps != 0) mbarrier_arrive(barriers_.q_empty());
    finish(tile, steps != 0);
  }

  // This warpgroup has read the stage.
  MLA_DEVICE void release() {
    __syncwarp();
    mbarrier_arrive(barriers_.kv_empty(kv_.stage));
    kv_.next();
  }
  MLA_DEVICE uint32_t stage() const { return shared_ + Storage::KV + kv_.stage * Traits::STAGE_BYTES; }

  MLA_DEVICE void one_step() {
    mbarrier_wait(barriers_.kv_full(kv_.stage), kv_.parity);
    fence_proxy_async();  // the producer has stored the keys, and does not fence
    float s[S_REGS];
    multiply_keys(s);
    mask_absent(s);
    float sum[LANE_ROWS];
    const bool outgrown = exponentiate(s, sum);
    fence_proxy_async();
    if (__builtin_expect(named_barrier_any<128>(PV_GROUP_BARRIER, outgrown), 0)) {
      raise_max(s);
      exponentiate(s, sum);
      fence_proxy_async();
      sync();
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) sum_[i] += sum[i];
    multiply_values();
    p_stage_ ^= 1;
  }

  // S^T of 64 keys.
  MLA_DEVICE void multiply_keys(float (&s)[S_REGS]) const {
    const uint32_t box = Traits::q_box_bytes(params_);
    const uint64_t k = make_descriptor(warp_uniform(stage()), 0, Traits::GROUP_BYTES, Swizzle::bytes128);
    // Of at most eight heads rows 8 to 15 are rows 0 to 7 once more, whose results nobody stores.
    const uint64_t q = make_descriptor(warp_uniform(shared_ + Storage::Q), 0, box - 512, Swizzle::bytes64);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::HEAD_DIM_QK / 16; ++step)
      mma_ss(s, advance_descriptor(k, step / 4 * Traits::BLOCK_BYTES + step % 4 * 32),
             advance_descriptor(q, step / 2 * box + step % 2 * 32), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin_accumulator(s);
  }

  // Scores of absent keys become -inf. Each producer warp has said which of its keys are there.
  MLA_DEVICE void mask_absent(float (&s)[S_REGS]) const {
    const uint32_t words = shared_ + Traits::PRESENT + kv_.stage * Traits::PRESENT_BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = warp_ * 16 + half * 8 + Layout::quad();
      const uint32_t word = ld_shared<uint32_t>(words + key / Traits::OWN_KEYS * 4);
      const bool absent = (word >> key % Traits::OWN_KEYS & 1) == 0;
#pragma unroll
      for (int i = 0; i < S_REGS; ++i)
        if (i / 2 % 2 == half && absent) s[i] = -INFINITE;
    }
  }

  // P to shared memory, and its sums over this lane's keys.
  MLA_DEVICE bool exponentiate(const float (&s)[S_REGS], float (&sum)[LANE_ROWS]) const {
    const auto scale_and_max = [&](int pair, float (&scale)[2], float (&max)[2]) {
      scale[0] = scale[1] = scale_;
      max[0] = max_[2 * pair];
      max[1] = max_[2 * pair + 1];
    };
    return Layout::template exponentiate<bf16>(
        s, [&] { return p_at() + warp_ * Traits::P_STEP_BYTES; }, scale_and_max, sum);
  }

  MLA_DEVICE uint32_t p_at() const { return shared_ + Storage::P + p_stage_ * Traits::P_BYTES; }
  MLA_DEVICE uint32_t of_warp(int warp, int row) const { return shared_ + Storage::OF_WARP + (warp * ROWS + row) * 4; }

  // Raises the running max of every row to its largest score so far, and rescales O and the sums.
  MLA_DEVICE void raise_max(const float (&s)[S_REGS]) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      float top = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
#pragma unroll
      for (int lane = 4; lane < 32; lane *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lane));
      if (Layout::quad() == 0) st_shared(of_warp(warp_, Layout::row(i)), top);
    }
    sync();
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      float top = -INFINITE;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) top = fmaxf(top, ld_shared<float>(of_warp(warp, Layout::row(i))));
      const float raised = fmaxf(max_[i], top * scale_), factor = exp2_approx(max_[i] - raised);
      max_[i] = raised;
      sum_[i] *= factor;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        o_[tile][i / 2 * 4 + i % 2] *= factor;
        o_[tile][i / 2 * 4 + i % 2 + 2] *= factor;
      }
    }
  }

  // O^T += V^T P^T of the stage. Absent keys are zeros there.
  MLA_DEVICE void multiply_values() {
    const uint64_t v = make_descriptor(warp_uniform(stage()), 0, Traits::GROUP_BYTES, Swizzle::bytes128);
    const uint64_t p = make_descriptor(warp_uniform(p_at()), ROWS / 8 * 128, 128, Swizzle::none);
#pragma unroll
    for (int i = 0; i < TILES; ++i) pin_accumulator(o_[i]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Traits::STAGE_KEYS / 16; ++k)
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        mma_ss_transposed(o_[i], advance_descriptor(v, i * Traits::BLOCK_BYTES + k * 2 * Traits::GROUP_BYTES),
                          advance_descriptor(p, k * Traits::P_STEP_BYTES), true);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILES; ++i) pin_accumulator(o_[i]);
  }

  // Adds up the sums of all warps, and stores O / denominators, by way of the stage that was read last.
  MLA_DEVICE void finish(const WorkTile& tile, bool any) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
#pragma unroll
      for (int lane = 4; lane < 32; lane *= 2) sum_[i] += __shfl_xor_sync(~0u, sum_[i], lane);
      if (Layout::quad() == 0) st_shared(of_warp(warp_, Layout::row(i)), sum_[i]);
    }
    sync();  // all warps have multiplied the stage
    const Epilogue epilogue(params_, shared_);
    const Queries queries(params_, tile.sequence);
    // A lane of the first warp has the running max of other rows than its own number's, so that it comes by shuffle.
    if (warp_ == 0) {
      const int row = warpgroup_thread() % ROWS, from = row % 8 / 2;
      float max = 0.0f;
#pragma unroll
      for (int i = 0; i < LANE_ROWS; ++i) {
        const float of_row = __shfl_sync(~0u, max_[i], from);
        if (i == row / 8 * 2 + row % 2) max = of_row;
      }
      float sum = 0.0f;
      for (int warp = 0; warp < 4; ++warp) sum += ld_shared<float>(of_warp(warp, row));
      if (warpgroup_thread() < ROWS) epilogue.finish_row(tile, queries, row, max, any ? sum : 0.0f, 1.0f);
    }
    if (any) {
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int r = 0; r < S_REGS; ++r)
          st_shared(out_at(r / 4 * 8 + Layout::in_quad() * 2 + r % 2,
                           i * 64 + warp_ * 16 + r / 2 % 2 * 8 + Layout::quad()), o_[i][r]);
    }
    sync();
    constexpr int PIECES = Traits::Problem::HEAD_DIM_V / 8;
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / 128; ++i) {
      const int number = i * 128 + warpgroup_thread(), row = number / PIECES, column = number % PIECES * 8;
      float eight[8] = {};
      if (any) {
        ld_shared_v4(out_at(row, column), eight[0], eight[1], eight[2], eight[3]);
        ld_shared_v4(out_at(row, column + 4), eight[4], eight[5], eight[6], eight[7]);
      }
      epilogue.store(tile, row, column, eight);
    }
    if (any) release();
  }

  MLA_DEVICE uint32_t out_at(int row, int column) const { return stage() + row * Traits::OUT_ROW_BYTES + column * 4; }

  const Params& params_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  int warp_;
  float scale_;
  uint32_t q_parity_ = 0;
  int p_stage_ = 0;
  PipelineState<Traits::STAGES> kv_;
  PipelineState<Traits::TILE_STAGES> tiles_;
  float max_[LANE_ROWS];
  float sum_[LANE_ROWS];
  float o_[TILES][S_REGS];  // tile i has columns 64i and on: of each warp 16, of which a lane has two
};

}  // namespace mla::sm_90
