// The sum of a node: a CTA whose work tile is several splits of a sequence adds their results in memory, where no other
// CTA looks, since the registers have room for one. What shared memory has room for lies there. The rest stays in L2, and
// nearly always it is only added to, so that the next split's products do not wait for it.
#pragma once

#include "sm_90/decode/epilogue.hpp"
#include "sm_90/decode/node_state.hpp"
#include "sm_90/split_fold.hpp"

namespace mla::sm_90 {

// Where the factors of a node's rows lie in the P stage that finishes a split, in place of P.
struct FoldStage {
  static constexpr int BEFORE = 0;
  static constexpr int OF_SPLIT = 4 * BLOCK_M;
  static constexpr int INVERSE = 8 * BLOCK_M;
};

// The folds of the two rows of a QK thread.
struct RowFolds {
  SplitFold of_row[2];

  // Stores the states but for the sums of results, which PV stores.
  MLA_DEVICE void store(const DecodeTmaParams& params, int partial_row) const {
    if (warpgroup_thread() % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + quad_row() + half * 8;
      if (row >= params.rows) continue;
      float* state = state_of(params, partial_row, row);
      state[0] = of_row[half].base;
      state[1] = of_row[half].sum;
    }
  }

  // Adds a split. Its `inverse` and what PV scales by go to the P stage, where the thread's rows begin at `row`; then
  // `inverse` and `lse` are the node's so far.
  MLA_DEVICE void add(uint32_t row, float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SplitFold& fold = of_row[half];
      float before, factor;
      fold.add(lse[half], before, factor);
      if (warpgroup_thread() % 4 == 0) {
        st_shared(row + half * 32 + FoldStage::BEFORE, before);
        st_shared(row + half * 32 + FoldStage::OF_SPLIT, factor);
        st_shared(row + half * 32 + FoldStage::INVERSE, inverse[half]);
      }
      lse[half] = fold.lse();
      inverse[half] = fold.scale();
    }
  }
};

// What a thread of a PV warpgroup holds of the sum, a tile of its columns at a time: two values of its first row and two
// of its second, as it holds them in registers.
class NodeSum {
  static constexpr int GROUP_VALUES = BLOCK_M * WIDEST_HEAD_DIM_V / 2;

 public:
  // How this thread's rows of a split count, from the P stage that finishes it.
  struct Factors {
    float inverse[2];   // 1 / the split's own sum
    float of_split[2];
    float before[2];    // of what was added before
    MLA_DEVICE explicit Factors(uint32_t p_stage) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t row = p_stage + (quad_row() + 8 * half) * 4;
        inverse[half] = ld_shared<float>(row + FoldStage::INVERSE);
        of_split[half] = ld_shared<float>(row + FoldStage::OF_SPLIT);
        before[half] = ld_shared<float>(row + FoldStage::BEFORE);
      }
    }
  };

  // `shared` is where the part in shared memory begins.
  MLA_DEVICE NodeSum(const DecodeTmaParams& params, uint32_t shared, int group)
      : shared_(shared + (group * 128 + warpgroup_thread()) * 16),
        at_(params.partial_out + static_cast<int64_t>(params.fold_slot) * params.rows * WIDEST_HEAD_DIM_V +
            (block(params) * 2 + group) * GROUP_VALUES + warpgroup_thread() * 4),
        no_rows_(first_row() + warpgroup_thread() / 32 * 16 >= params.rows) {}

  // Begins the sum with the result of a split.
  template <class Accumulator>
  MLA_DEVICE void begin(const Accumulator& o, Factors factors) const {
    pin_floats(factors.inverse[0], factors.inverse[1]);  // nothing of a branch is computed before it
    for_each_tile<Accumulator>([&](int tile) {
      float four[4];
      terms(o, tile, factors, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = SplitFold::added(-0.0f, 1.0f, four[i]);
      store_tile(tile, four);
    });
  }

  // Adds the result of another.
  template <class Accumulator>
  MLA_DEVICE void add(const Accumulator& o, Factors factors) const {
    pin_floats(factors.inverse[0], factors.inverse[1]);
    if (factors.before[0] == 1.0f && factors.before[1] == 1.0f)
      for_each_tile<Accumulator>([&](int tile) {
        float four[4];
        if (tile < SHARED_TILES) {
          with(o, tile, load_tile(tile), factors, four);
          store_tile(tile, four);
        } else {
          terms(o, tile, factors, four);
          red_add_global(place(tile), four);
        }
      });
    else
      for_each_tile<Accumulator>([&](int tile) {
        float four[4];
        with(o, tile, load_tile(tile), factors, four);
        store_tile(tile, four);
      });
  }

  // The sum of a node's only split, in place.
  template <int PRODUCTS, int VALUES>
  MLA_DEVICE static void of_one(float (&o)[PRODUCTS][VALUES], Factors factors) {
#pragma unroll
    for (int tile = 0; tile < PRODUCTS * VALUES / 4; ++tile) {
      float four[4];
      terms(o, tile, factors, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) o[tile / 16][tile % 16 * 4 + i] = SplitFold::added(-0.0f, 1.0f, four[i]);
    }
  }

  // Loads the sum of all splits.
  template <int PRODUCTS, int VALUES>
  MLA_DEVICE void load(float (&o)[PRODUCTS][VALUES]) const {
    if (no_rows_) return;
#pragma unroll
    for (int tile = 0; tile < PRODUCTS * VALUES / 4; ++tile) {
      const uint4 four = load_tile(tile);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) o[tile / 16][tile % 16 * 4 + i] = bit_cast<float>(words[i]);
    }
  }

 private:
  template <class Accumulator, class Body>
  MLA_DEVICE void for_each_tile(const Body& body) const {
    if (no_rows_) return;
#pragma unroll
    for (int tile = 0; tile < static_cast<int>(sizeof(Accumulator) / 16); ++tile) body(tile);
  }

  // A tile of the sum, as it was loaded, with the result of a split.
  template <class Accumulator>
  MLA_DEVICE static void with(const Accumulator& o, int tile, const uint4& loaded, const Factors& factors,
                              float (&four)[4]) {
    const uint32_t sum[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    terms(o, tile, factors, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = SplitFold::added(bit_cast<float>(sum[i]), factors.before[i / 2], four[i]);
  }

  template <class Accumulator>
  MLA_DEVICE static void terms(const Accumulator& o, int tile, const Factors& factors, float (&four)[4]) {
    scaled_tile(o, tile, factors.inverse, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = SplitFold::term(four[i], factors.of_split[i / 2]);
  }

  MLA_DEVICE static int block(const DecodeTmaParams& params) {
    const int tiles = (params.rows + BLOCK_M - 1) / BLOCK_M;
    return blockIdx.y * tiles + blockIdx.x;
  }
  MLA_DEVICE uint4 load_tile(int tile) const {
    if (tile >= SHARED_TILES) return ld_relaxed_gpu_v4(place(tile));
    uint4 four;
    ld_shared_v4(shared_place(tile), four.x, four.y, four.z, four.w);
    return four;
  }
  MLA_DEVICE void store_tile(int tile, const float (&four)[4]) const {
    if (tile < SHARED_TILES)
      st_shared_v4(shared_place(tile), four);
    else
      st_relaxed_gpu(place(tile), four);
  }

  MLA_DEVICE uint32_t shared_place(int tile) const { return shared_ + tile * 256 * 16; }
  MLA_DEVICE float* place(int tile) const { return at_ + tile * 128 * 4; }

  uint32_t shared_;
  float* at_;
  bool no_rows_;  // this warp has none
};

}  // namespace mla::sm_90
