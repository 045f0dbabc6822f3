// The results of a work tile: each warpgroup has those of its own steps, and the first adds them up and stores them.
#pragma once

#include "sm_90/decode/named_barriers.hpp"
#include "sm_90/decode/softmax.hpp"
#include "sm_90/decode/swap_ab/epilogue.hpp"
#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/sparse_decode/swap_ab/lane_layout.hpp"

namespace mla::sm_90 {

// A lane's part of a warpgroup's results: for its rows the running max, the sum of P over its own keys, and 16
// neighbouring columns of O. Tile i of 64 columns has columns 2i and 2i + 1 of these.
template <class Traits>
struct SparseSwapAbState {
  static constexpr int TILES = Traits::TILES;
  static constexpr int LANE_ROWS = SparseSwapAbLayout<Traits>::LANE_ROWS;
  static constexpr int REGS = SparseSwapAbLayout<Traits>::S_REGS;
  float max[LANE_ROWS];
  float sum[LANE_ROWS];
  float o[TILES][REGS];

  MLA_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      max[i] = LOWEST;
      sum[i] = 0.0f;
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int r = 0; r < REGS; ++r) o[tile][r] = 0.0f;
  }

  MLA_DEVICE void rescale(int row, float factor) {
    sum[row] *= factor;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      o[tile][row / 2 * 4 + row % 2] *= factor;
      o[tile][row / 2 * 4 + row % 2 + 2] *= factor;
    }
  }
};

template <class Traits, class Epilogue>
class SparseSwapAbMerge {
  using Params = typename Traits::Params;
  using Storage = SharedStorage<Traits>;
  using Layout = SparseSwapAbLayout<Traits>;
  using State = SparseSwapAbState<Traits>;
  using KvState = PipelineState<Traits::STAGES>;
  static constexpr int ROWS = Traits::ROWS;
  static constexpr int GROUPS = Traits::GROUPS;
  // Results go from one warpgroup to another through the stages of its last step, as many tiles at a time as these hold.
  static constexpr int STAGE_TILES = ROWS == 16 ? 2 : 1;
  static constexpr int ROUND_TILES = STAGE_TILES * Traits::STEP_STAGES;
  static constexpr int PIECES = State::REGS / 4;  // of 16 bytes a lane, of a tile
  static_assert(STAGE_TILES * PIECES * 2048 <= Traits::STAGE_BYTES, "a stage has room for its tiles");

 public:
  MLA_DEVICE SparseSwapAbMerge(const Params& params, uint32_t shared, int group, int warp)
      : params_(params), barriers_(shared), shared_(shared), group_(group), warp_(warp) {}

  // Whether a warpgroup keeps the stages of its last step for its results.
  MLA_DEVICE static bool keeps_stages(int group) { return group != 0; }

  // Called by all warpgroups that multiply. `first` is the first stage of the tile, `last` that of this warpgroup's last
  // step, if it has one.
  MLA_DEVICE void finish(const WorkTile& tile, State& state, int steps, const KvState& first, const KvState& last) {
    if (steps <= 1) {
      if (group_ != 0) return;
      publish(state);
      named_barrier_sync<128>(PV_GROUP_BARRIER);
      finish_rows(tile, 1, steps != 0);
      named_barrier_sync<128>(PV_GROUP_BARRIER);
      store(tile, state);
      return;
    }
    publish(state);
    sync();
    const int count = min(steps, GROUPS);
    if (group_ == 0) finish_rows(tile, count, true);
#pragma unroll
    for (int i = 0; i < Layout::LANE_ROWS; ++i) state.rescale(i, factor_of(group_, count, Layout::row(i)));
#pragma unroll
    for (int begin = 0; begin < State::TILES; begin += ROUND_TILES) {
      if (group_ != 0 && group_ < steps) give(state, begin, last);
      sync();
      if (group_ == 0)
        for (int group = 1; group < count; ++group) take(state, begin, last_of(group, steps, first));
      sync();
    }
    if (group_ == 0) store(tile, state);
    if (group_ == 0 || group_ >= steps) return;
    KvState kv = last;
    for (int stage = 0; stage < Traits::STEP_STAGES; ++stage, kv.next()) mbarrier_arrive(barriers_.kv_empty(kv.stage));
  }

 private:
  MLA_DEVICE static void sync() { named_barrier_sync<PV_BARRIER, Traits::CONSUMERS>(); }
  MLA_DEVICE uint32_t of_warp(int group, int warp, int row) const {
    return shared_ + Storage::OF_WARP + ((group * 4 + warp) * ROWS + row) * 4;
  }
  MLA_DEVICE uint32_t of_group(int group, int row) const {
    return shared_ + Storage::OF_GROUP + (group * ROWS + row) * 4;
  }

  MLA_DEVICE void publish(const State& state) const {
#pragma unroll
    for (int i = 0; i < Layout::LANE_ROWS; ++i) {
      const float sum = Layout::sum_over_keys(state.sum[i]);
      if (Layout::quad() != 0) continue;
      st_shared(of_warp(group_, warp_, Layout::row(i)), sum);
      if (warp_ == 0) st_shared(of_group(group_, Layout::row(i)), state.max[i]);
    }
  }

  MLA_DEVICE float max_of(int count, int row) const {
    float top = LOWEST;
    for (int group = 0; group < count; ++group) top = fmaxf(top, ld_shared<float>(of_group(group, row)));
    return top;
  }
  // Brings a warpgroup's P, which is relative to its own running max, to that of all.
  MLA_DEVICE float factor_of(int group, int count, int row) const {
    return exp2_approx(ld_shared<float>(of_group(group, row)) - max_of(count, row));
  }

  // A thread for each row, of the first warpgroup.
  MLA_DEVICE void finish_rows(const WorkTile& tile, int count, bool any) const {
    const Queries queries(params_, tile.sequence);
    const int row = warpgroup_thread();
    if (row >= ROWS) return;
    float sum = 0.0f;
    for (int group = 0; group < count; ++group) {
      float of_its_warps = 0.0f;
      for (int warp = 0; warp < 4; ++warp) of_its_warps += ld_shared<float>(of_warp(group, warp, row));
      sum += of_its_warps * factor_of(group, count, row);
    }
    Epilogue(params_, shared_).finish_row(tile, queries, row, max_of(count, row), any ? sum : 0.0f, 1.0f);
  }

  MLA_DEVICE uint32_t piece_at(const KvState& kv, int tile, int piece) const {
    const KvState at = advanced(kv, tile % ROUND_TILES / STAGE_TILES);
    return shared_ + Storage::KV + at.stage * Traits::STAGE_BYTES +
           (tile % STAGE_TILES * PIECES + piece) * 2048 + warpgroup_thread() * 16;
  }
  MLA_DEVICE void give(const State& state, int begin, const KvState& kv) const {
#pragma unroll
    for (int tile = begin; tile < begin + ROUND_TILES; ++tile)
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = state.o[tile][piece * 4 + i];
        st_shared_v4(piece_at(kv, tile, piece), four);
      }
  }
  MLA_DEVICE void take(State& state, int begin, const KvState& kv) const {
#pragma unroll
    for (int tile = begin; tile < begin + ROUND_TILES; ++tile)
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        uint32_t four[4];
        ld_shared_v4(piece_at(kv, tile, piece), four);
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[tile][piece * 4 + i] += bit_cast<float>(four[i]);
      }
  }
  // The first stage of a warpgroup's last step.
  MLA_DEVICE static KvState last_of(int group, int steps, const KvState& first) {
    return advanced(first, ((steps - 1 - group) / GROUPS * GROUPS + group) * Traits::STEP_STAGES);
  }

  MLA_DEVICE void store(const WorkTile& tile, const State& state) const {
    const Epilogue epilogue(params_, shared_);
    const int column = warp_ * 128 + Layout::quad() * 16;
#pragma unroll
    for (int i = 0; i < Layout::LANE_ROWS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float eight[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) eight[c] = state.o[half * 4 + c / 2][i / 2 * 4 + c % 2 * 2 + i % 2];
        epilogue.store(tile, Layout::row(i), column + half * 8, eight);
      }
  }

  const Params& params_;
  Mbarriers<Traits> barriers_;
  uint32_t shared_;
  int group_;
  int warp_;
};

}  // namespace mla::sm_90
