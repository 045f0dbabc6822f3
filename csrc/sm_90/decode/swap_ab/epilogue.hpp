// The epilogue of swap_ab. A lane has eight neighbouring columns of O for each of its rows, and eight lanes have 64, so
// results go to memory in whole lines as they are.
#pragma once

#include "sm_90/decode/query_rows.hpp"
#include "sm_90/decode/softmax.hpp"
#include "sm_90/decode/swap_ab/shared_storage.hpp"

namespace mla::sm_90 {

// The work tile that a producer has published at `at`. Called by warps.
MLA_DEVICE WorkTile published_tile(uint32_t at) {
  uint32_t words[4];  // the first four members of PublishedTile
  ld_shared_v4(at, words);
  WorkTile tile;
  tile.sequence = warp_uniform(words[0]);
  tile.length = warp_uniform(words[1]);
  tile.first_key = warp_uniform(words[2]);
  tile.end_key = warp_uniform(words[3]);
  tile.partial_row = warp_uniform(ld_shared<int>(at + TILE_PARTIAL_ROW));
  return tile;
}

template <class Traits>
class SwapAbEpilogue {
  using Params = typename Traits::Params;
  using Element = typename Traits::OutElement;
  using Storage = SharedStorage<Traits>;

 public:
  MLA_DEVICE SwapAbEpilogue(const Params& params, uint32_t shared) : params_(params), shared_(shared) {}

  // Stores the lse of a row of the block, and leaves in shared memory what its results are multiplied by and where they
  // go. Called by one thread for each row; `queries` are the tile's, which whole warps must ask for.
  MLA_DEVICE void finish_row(const WorkTile& tile, const Queries& queries, int number, float max, float sum,
                             float value_scale) const {
    const QueryRow row(Heads(params_), queries, first_row() + number);
    const bool any = sum != 0.0f;  // NaN included
    float denominator = sum;
    const bool partial = tile.partial_row >= 0;
    if (any && !partial && params_.attn_sink != nullptr)
      denominator += exp2_approx(__ldg(params_.attn_sink + row.index % params_.heads) * LOG2_E - max);
    const int64_t first_partial = static_cast<int64_t>(tile.partial_row) * Traits::Problem::rows(params_);
    int64_t to = -1;
    if (row.valid) {
      float lse = lse_of_row(max, sum);
      if (partial) {
        to = (first_partial + row.index) * WIDEST_HEAD_DIM_V;
        params_.partial_lse[first_partial + row.index] = lse;
      } else {
        to = (queries.first_token + row.token) * params_.out_token_stride + row.head * params_.out_head_stride;
        if (lse == -INFINITE) lse = params_.empty_lse;
        params_.lse[lse_of_token(params_, queries.first_token) + lse_of_row_at(params_, row.index)] = lse;
      }
    }
    st_shared(shared_ + Storage::FACTOR + number * 4, any ? __fdividef(value_scale, denominator) : 0.0f);
    st_shared(shared_ + Storage::OUT_AT + number * 8, static_cast<uint32_t>(to));
    st_shared(shared_ + Storage::OUT_AT + number * 8 + 4, static_cast<uint32_t>(to >> 32));
  }

  // Stores eight columns of a row.
  MLA_DEVICE void store(const WorkTile& tile, int number, int column, const float (&eight)[8]) const {
    const uint32_t low = ld_shared<uint32_t>(shared_ + Storage::OUT_AT + number * 8);
    const int32_t high = ld_shared<int32_t>(shared_ + Storage::OUT_AT + number * 8 + 4);
    if (high < 0) return;
    const int64_t to = (static_cast<int64_t>(high) << 32 | low) + column;
    const float factor = ld_shared<float>(shared_ + Storage::FACTOR + number * 4);
    if (tile.partial_row >= 0) {
      float4* out = reinterpret_cast<float4*>(params_.partial_out + to);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        out[i] = make_float4(eight[4 * i] * factor, eight[4 * i + 1] * factor, eight[4 * i + 2] * factor,
                             eight[4 * i + 3] * factor);
    } else {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = pack_pair<Element>(eight[2 * i] * factor, eight[2 * i + 1] * factor);
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params_.out) + to) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

 private:
  const Params& params_;
  uint32_t shared_;
};

}  // namespace mla::sm_90
