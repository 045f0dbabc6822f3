// The two warpgroups of swap_ab that multiply. In a step each computes S^T = K Q^T of 64 of its 128 keys and their P;
// then both compute O^T += V^T P^T of all 128 keys, 256 columns each. Keys are read as they are stored and converted to
// fp16 in registers, where the first operand lies; P goes through shared memory.
#pragma once

#include "sm_90/decode/descales.hpp"
#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/decode/swap_ab/epilogue.hpp"
#include "sm_90/decode/swap_ab/lane_layout.hpp"
#include "sm_90/decode/swap_ab/queries.hpp"
#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/wgmma_rs.hpp"

namespace mla::sm_90 {

template <class Traits, class Epilogue>
class SwapAbMainloop {
  using Params = typename Traits::Params;
  using Storage = SharedStorage<Traits>;
  static constexpr int ROWS = Traits::ROWS;
  using Layout = LaneLayout<Traits>;
  static constexpr int S_REGS = Layout::S_REGS;
  static constexpr int LANE_ROWS = Layout::LANE_ROWS;
  static constexpr int ROW_BYTES = Traits::HEAD_DIM_QK;
  static constexpr int BLOCKS = Traits::COLUMN_BLOCKS;
  static constexpr int WARPS = Traits::CONSUMERS / 32;
  static constexpr int TILES = 4;  // of 64 columns of O^T
  // Steps of K Q^T, 16 deep, that are converted and issued together. While one such group is multiplied the next is
  // converted.
  static constexpr int GROUP_STEPS = 4;

 public:
  MLA_DEVICE SwapAbMainloop(const Params& params, uint32_t shared, int group)
      : params_(params),
        barriers_(shared),
        shared_(shared),
        group_(group),
        warp_(warp_uniform(warpgroup_thread() / 32)),
        scale_(params.softmax_scale * LOG2_E) {
    const int lane = warpgroup_thread() % 32, quad = lane / 4, in_quad = lane % 4;
    key_at_ = Layout::key_offset(key_of_row(warp_ % 2, quad)) + in_quad * 16;
    const int column = group * 256 + warp_ * 64 + quad * 8;
    value_at_[0] = Layout::key_offset(key_of_row(0, in_quad * 2)) + column;
    value_at_[1] = Layout::key_offset(key_of_row(0, in_quad * 2 + 1)) + column;
  }

  MLA_DEVICE void run() {
    for (bool any = false; next_tile(); any = true) {
      // The producer has waited for the previous kernel, which may have written these.
      if (!any) scale_ = score_scale<Traits>(params_, scale_);
      one_tile();
    }
  }

 private:
  using KvState = PipelineState<Traits::STAGES>;


  MLA_DEVICE static void sync() { named_barrier_sync<PV_BARRIER, Traits::CONSUMERS>(); }
  MLA_DEVICE static int consumer_thread() { return thread_id() - 128; }
  MLA_DEVICE int consumer_warp() const { return group_ * 4 + warp_; }

  // The tile stays in its slot until it is done, because there are no registers to keep all of it in.
  MLA_DEVICE bool next_tile() {
    mbarrier_wait(barriers_.tile_full(tiles_.stage), tiles_.parity);
    info_ = warp_uniform(ld_shared<int>(tile_at() + TILE_INFO));
    return info_ != END_OF_WORK;
  }
  MLA_DEVICE uint32_t tile_at() const { return shared_ + Storage::TILES + tiles_.stage * sizeof(PublishedTile); }
  MLA_DEVICE WorkTile tile() const { return published_tile(tile_at()); }

  MLA_DEVICE void one_tile() {
    const WorkTile given = tile();
    int first = given.template first_stage<BLOCK_N>();
    end_ = given.end_key;
    const bool any = first < end_;
    if (any) {
      take_queries(tile());
      clear_absent(0, 0, given.first_key - first);
    } else if (info_ == Q_LOADED) {
      for (int i = 0; i < Traits::Q_STAGES; ++i) {
        mbarrier_wait(barriers_.kv_full(kv_.stage), kv_.parity);
        release();
      }
    }
    // Only now, because queries take many registers.
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int r = 0; r < S_REGS; ++r) o_[i][r] = 0.0f;
    sum_[0] = sum_[1] = 0.0f;
#pragma unroll 1
    for (; first < end_; first += Traits::BLOCK_KEYS) step(first);
    finish(tile(), any);
    __syncwarp();
    mbarrier_arrive(barriers_.tile_empty(tiles_.stage));
    tiles_.next();
  }

  // This thread has read the next stage.
  MLA_DEVICE void release() {
    __syncwarp();
    mbarrier_arrive(barriers_.kv_empty(kv_.stage));
    kv_.next();
  }

  MLA_DEVICE uint32_t stage_at(const KvState& kv) const {
    return shared_ + Storage::KV + kv.stage * Traits::STAGE_BYTES;
  }

  // Every warp takes four rows at a time; both stages and threads are then done with what they had of the last tile.
  MLA_DEVICE void take_queries(const WorkTile& tile) {
    const Queries queries(params_, tile.sequence);
    const Heads heads(params_);
#pragma unroll 1
    for (int first = consumer_warp() * 4; first < ROWS; first += 32) {
      const int row = first + warpgroup_thread() % 32 / 8;
      KvState kv = kv_;
      for (int i = 0; i < first / 16; ++i) kv.next();
      mbarrier_wait(barriers_.kv_full(kv.stage), kv.parity);
      const QueryRow query(heads, queries, first_row() + row);
      SwapAbQueries<Traits>::take_row(shared_, row, stage_at(kv) + row % 16 * Traits::Q_ROW_BYTES, query.valid, scale_);
      if (warpgroup_thread() % 8 == 0)
        st_shared(shared_ + Storage::KEY_LIMIT + row * 4, query.key_limit(params_, queries, tile));
    }
    common_limit_ = common_limit(params_, heads, queries, tile, 0, tile.template first_stage<BLOCK_N>());
    fence_proxy_async();
    sync();
    for (int i = 0; i < Traits::Q_STAGES; ++i) release();
  }

  // 128 keys from `first` on, or what the tile has of them.
  MLA_DEVICE void step(int first) {
    const int stages = min((end_ - first + BLOCK_N - 1) / BLOCK_N, Traits::STEP_STAGES);
    if (__builtin_expect(first + Traits::BLOCK_KEYS > end_, 0)) {
      const int used = (end_ - first) % BLOCK_N;
      clear_absent(stages - 1, used == 0 ? BLOCK_N : used, BLOCK_N);
    }
    float s[S_REGS];
    multiply_keys(s, stages);
    if (__builtin_expect(first + Traits::BLOCK_KEYS > common_limit_, 0)) mask(s, first);
    float sum[2];
    const bool outgrown = exponentiate(s, sum);
    fence_proxy_async();
    if (__builtin_expect(named_barrier_any<PV_BARRIER, Traits::CONSUMERS>(outgrown), 0)) {
      raise_max(s);
      exponentiate(s, sum);
      fence_proxy_async();
      sync();
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    multiply_values(stages);
    p_stage_ ^= 1;
  }

  // The stage that this step's stage `number` is in.
  MLA_DEVICE KvState ahead(int number) const {
    KvState kv = kv_;
    kv.stage += number;
    if (kv.stage >= Traits::STAGES) {
      kv.stage -= Traits::STAGES;
      kv.parity ^= 1;
    }
    return kv;
  }

  // Zeros keys from..to - 1 of this step's stage `number`, which are not the tile's: their P is 0, but what lies there
  // may be NaN. K Q^T may read them before or after, because their scores are masked; P V reads them behind the barrier.
  MLA_DEVICE void clear_absent(int number, int from, int to) {
    if (from >= to) return;
    const KvState kv = ahead(number);
    mbarrier_wait(barriers_.kv_full(kv.stage), kv.parity);
    constexpr int PIECES = ROW_BYTES / 16;
    for (int i = consumer_thread(); i < (to - from) * PIECES; i += Traits::CONSUMERS)
      st_shared_v4(stage_at(kv) + Layout::key_offset(from + i / PIECES) + i % PIECES * 16, 0, 0, 0, 0);
  }

  // S^T of this warpgroup's 64 keys: of each warp 16, of one stage. A warp whose stage the tile does not have
  // multiplies keys of the first one, which are masked.
  MLA_DEVICE void multiply_keys(float (&s)[S_REGS], int stages) {
    const int number = group_ * 2 + warp_ / 2;
    const KvState kv = ahead(number < stages ? number : 0);
    mbarrier_wait(barriers_.kv_full(kv.stage), kv.parity);
    const uint32_t from = stage_at(kv) + key_at_;
    const uint64_t q = make_descriptor(warp_uniform(shared_ + Storage::Q), 0, 1024, Swizzle::bytes128);
    uint32_t stored[2][2][4];
    ld_shared_v4(from, stored[0][0]);
    ld_shared_v4(from + 4 * ROW_BYTES, stored[0][1]);
    uint32_t keys[2][GROUP_STEPS][4];
#pragma unroll
    for (int group = 0; group < BLOCKS * 4 / GROUP_STEPS; ++group) {
      const int c = group * GROUP_STEPS / 4, begin = group * GROUP_STEPS % 4;
      if (begin == 0 && c + 1 < BLOCKS) {
        ld_shared_v4(from + (c + 1) * 64, stored[(c + 1) % 2][0]);
        ld_shared_v4(from + (c + 1) * 64 + 4 * ROW_BYTES, stored[(c + 1) % 2][1]);
      }
      if (group >= 2) wgmma_wait<1>();
#pragma unroll
      for (int k = 0; k < GROUP_STEPS; ++k) {
        uint32_t(&step)[4] = keys[group % 2][k];
        e4m3_to_fp16(stored[c % 2][0][begin + k], step[0], step[2]);
        e4m3_to_fp16(stored[c % 2][1][begin + k], step[1], step[3]);
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < GROUP_STEPS; ++k)
        mma_rs<fp16>(s, keys[group % 2][k], advance_descriptor(q, c * Traits::Q_BLOCK_BYTES + (begin + k) * 32),
                     group + k > 0);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin_accumulator(s);
  }

  // Scores of keys that a row does not see become -inf.
  MLA_DEVICE void mask(float (&s)[S_REGS], int first) {
    const int key = first + (group_ * 2 + warp_ / 2) * BLOCK_N + key_of_row(warp_ % 2, warpgroup_thread() % 32 / 4);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      const int limit = ld_shared<int>(shared_ + Storage::KEY_LIMIT + Layout::row(i) * 4);
      if (key >= limit) s[i / 2 * 4 + i % 2] = -INFINITE;
      if (key + 4 >= limit) s[i / 2 * 4 + i % 2 + 2] = -INFINITE;
    }
    if (!has_window_or_tree(params_)) return;
    const WorkTile tile = this->tile();
    const Queries queries(params_, tile.sequence);
    const Heads heads(params_);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      const QueryRow row(heads, queries, first_row() + Layout::row(i));
      const uint32_t seen = row.seen_bits(params_, queries, tile.length, key);
      if ((seen & 1) == 0) s[i / 2 * 4 + i % 2] = -INFINITE;
      if ((seen & 1 << 4) == 0) s[i / 2 * 4 + i % 2 + 2] = -INFINITE;
    }
    common_limit_ = common_limit(params_, heads, queries, tile, 0, first + Traits::BLOCK_KEYS);
  }

  // P to shared memory, and its sums for the rows whose sums this lane keeps.
  MLA_DEVICE bool exponentiate(const float (&s)[S_REGS], float (&kept)[2]) const {
    float sum[LANE_ROWS];
    const auto scale_and_max = [&](int pair, float (&scale)[2], float (&max)[2]) {
      ld_shared_v4(shared_ + Storage::SCALE_AND_MAX + Layout::row(2 * pair) * 8, scale[0], max[0], scale[1], max[1]);
    };
    const bool outgrown = Layout::template exponentiate<fp16>(
        s, [&] { return p_at() + consumer_warp() * Traits::P_STEP_BYTES; }, scale_and_max, sum);
    Layout::add_over_lanes(sum, kept);
    return outgrown;
  }

  MLA_DEVICE uint32_t p_at() const { return shared_ + Storage::P + p_stage_ * Traits::P_BYTES; }

  // Raises the running max of every row to its largest score so far, and rescales O and the sums.
  MLA_DEVICE void raise_max(const float (&s)[S_REGS]) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      float top = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
#pragma unroll
      for (int lane = 4; lane < 32; lane *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lane));
      if (warpgroup_thread() % 32 < 4) st_shared(of_warp(consumer_warp(), Layout::row(i)), top);
    }
    sync();
    if (const int row = consumer_thread(); row < ROWS) {
      const uint32_t at = shared_ + Storage::SCALE_AND_MAX + row * 8;
      float top = -INFINITE;
      for (int warp = 0; warp < WARPS; ++warp) top = fmaxf(top, ld_shared<float>(of_warp(warp, row)));
      const float before = ld_shared<float>(at + 4);
      const float raised = fmaxf(before, top * ld_shared<float>(at));
      st_shared(at + 4, raised);
      st_shared(shared_ + Storage::FACTOR + row * 4, exp2_approx(before - raised));
    }
    sync();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] *= ld_shared<float>(shared_ + Storage::FACTOR + (Layout::kept_row() + i) * 4);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      const float factor = ld_shared<float>(shared_ + Storage::FACTOR + Layout::row(i) * 4);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        o_[tile][i / 2 * 4 + i % 2] *= factor;
        o_[tile][i / 2 * 4 + i % 2 + 2] *= factor;
      }
    }
  }

  MLA_DEVICE uint32_t of_warp(int warp, int row) const { return shared_ + Storage::OF_WARP + (warp * ROWS + row) * 4; }

  // O^T += V^T P^T of the step's stages, each of which is then released.
  MLA_DEVICE void multiply_values(int stages) {
    const uint64_t p = make_descriptor(warp_uniform(p_at()), ROWS / 8 * 128, 128, Swizzle::none);
#pragma unroll
    for (int i = 0; i < TILES; ++i) pin_accumulator(o_[i]);
    uint32_t values[2][TILES][4];
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_wait(barriers_.kv_full(kv_.stage), kv_.parity);
      uint32_t stored[2][2][2][2];
      const uint32_t from = stage_at(kv_);
      Layout::load_values(from, value_at_, stored[0]);
      Layout::load_values(from + 8 * ROW_BYTES, value_at_, stored[1]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            // Two neighbouring columns of both keys, of each column first the one key, then the other.
            const uint32_t pairs =
                __byte_perm(stored[k][half][0][i / 2], stored[k][half][1][i / 2], i % 2 == 0 ? 0x5140 : 0x7362);
            e4m3_to_fp16(pairs, values[k][i][half * 2], values[k][i][half * 2 + 1]);
          }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILES; ++i)
          mma_rs<fp16>(o_[i], values[k][i], advance_descriptor(p, (stage * 2 + k) * Traits::P_STEP_BYTES), true);
        wgmma_commit();
      }
      release();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILES; ++i) pin_accumulator(o_[i]);
  }

  // Adds up the row sums of all warps, and stores O / denominators.
  MLA_DEVICE void finish(const WorkTile& tile, bool any) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sum_[i];
#pragma unroll
      for (int lane = 4; lane < Layout::KEPT_LANES; lane *= 2) sum += __shfl_xor_sync(~0u, sum, lane);
      if (warpgroup_thread() % 32 % Layout::KEPT_LANES < 4)
        st_shared(of_warp(consumer_warp(), Layout::kept_row() + i), sum);
    }
    sync();
    const Epilogue epilogue(params_, shared_);
    const Queries queries(params_, tile.sequence);
    if (const int row = consumer_thread(); row < ROWS) {
      float sum = 0.0f;
      for (int warp = 0; warp < WARPS; ++warp) sum += ld_shared<float>(of_warp(warp, row));
      const float max = any ? ld_shared<float>(shared_ + Storage::SCALE_AND_MAX + row * 8 + 4) : LOWEST;
      epilogue.finish_row(tile, queries, row, max, sum, descale(params_.kv_descale));
    }
    sync();
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      float eight[8];
#pragma unroll
      for (int column = 0; column < 8; ++column)
        eight[column] = o_[column / 2][i / 2 * 4 + column % 2 * 2 + i % 2];
      epilogue.store(tile, Layout::row(i), group_ * 256 + warp_ * 64 + warpgroup_thread() % 32 / 4 * 8, eight);
    }
  }

  const Params& params_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  int group_;
  int warp_;  // of the warpgroup
  float scale_;
  uint32_t key_at_;       // the first of this lane's two keys of S^T within a stage, and its 16 bytes of 64
  uint32_t value_at_[2];  // the first two of its keys of V^T, and its columns
  int p_stage_ = 0;
  KvState kv_;
  PipelineState<Traits::TILE_STAGES> tiles_;
  int info_;          // TileInfo of the tile
  int end_;           // one past its last key
  int common_limit_;  // one past the last key that every row of the sequence sees
  float sum_[2];      // of P over this lane's keys, for the rows that it keeps
  float o_[TILES][S_REGS];  // tile i has columns 2i and 2i + 1 of the lane's eight
};

}  // namespace mla::sm_90
