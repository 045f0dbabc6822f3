// The tile scheduler of sparse decode: it gives a block its next query token and range of keys.
#pragma once

#include "common/plan_header.hpp"
#include "common/split_keys.hpp"
#include "sm_90/decode/pipeline.hpp"
#include "sm_90/sparse_decode/traits.hpp"

namespace mla::sm_90 {

// The tiles of a plan in the order of SM parts, or even splits: query token i / num_splits, split i % num_splits. The
// number of a token's keys is known only after its lists have been looked up. Each warp keeps its position in the list
// in shared memory, because it needs it once a tile and registers are scarce.
class SparseTileScheduler {
 public:
  using Params = SparseDecodeTmaParams;

  static constexpr int BYTES = 12;

  MLA_DEVICE SparseTileScheduler(const Params& params, uint32_t scratch) : params_(params), scratch_(scratch) {
    write(TAKEN, 0);
    const int part = blockIdx.y;
    if (params.plan != nullptr)
      open_part(part);
    else
      write(CURSOR, part);
  }

  MLA_DEVICE bool more() const {
    if (params_.plan == nullptr) return read(CURSOR) < params_.tokens * params_.num_splits;
    return read(PART) < plan_parts();
  }

  // Returns how many tiles have been taken.
  MLA_DEVICE int taken() const { return read(TAKEN); }

  // Returns the query token of the next tile.
  MLA_DEVICE int token() const {
    return params_.plan != nullptr ? warp_uniform(__ldg(plan_tile(read(CURSOR)))) : read(CURSOR) / params_.num_splits;
  }

  // Takes the next tile of a token with `keys` keys.
  MLA_DEVICE WorkTile take(int token, int keys) {
    WorkTile tile;
    const int cursor = read(CURSOR);
    write(TAKEN, read(TAKEN) + 1);
    tile.sequence = token;
    tile.length = keys;
    if (params_.plan != nullptr) {
      const int32_t* at = plan_tile(cursor);
      tile.first_key = warp_uniform(__ldg(at + 1));
      tile.end_key = warp_uniform(__ldg(at + 2));
      tile.partial_row = warp_uniform(__ldg(at + 3));
      const int part = read(PART);
      if (cursor + 1 < warp_uniform(__ldg(bounds() + part + 1)))
        write(CURSOR, cursor + 1);
      else
        open_part(part + params_.grid_stride);
    } else {
      const int splits = params_.num_splits;
      const int split = cursor - token * splits;
      int size = split_keys(params_.split_size, keys);
      if (size == 0) size = ((keys + BLOCK_N - 1) / BLOCK_N + splits - 1) / splits * BLOCK_N;
      const int64_t first = static_cast<int64_t>(split) * size;
      tile.first_key = first < keys ? static_cast<int>(first) : keys;
      // The last split is open: whatever split_size is, no key is left over.
      tile.end_key = split + 1 == splits || first + size > keys ? keys : tile.first_key + size;
      tile.partial_row = splits > 1 ? cursor : -1;
      write(CURSOR, cursor + params_.grid_stride);
    }
    if (tile.end_key > keys) tile.end_key = keys;
    return tile;
  }

 private:
  enum : int { PART = 0, CURSOR = 4, TAKEN = 8 };

  MLA_DEVICE int read(int field) const { return warp_uniform(ld_shared<int>(scratch_ + field)); }
  MLA_DEVICE void write(int field, int value) const {
    __syncwarp();
    if (warpgroup_thread() % 32 == 0) st_shared(scratch_ + field, value);
    __syncwarp();
  }

  MLA_DEVICE const int32_t* plan_tile(int number) const {
    const int work_tiles = warp_uniform(__ldg(params_.plan + PlanHeader::work_tiles));
    return params_.plan + work_tiles + PlanHeader::work_tile_words * static_cast<int64_t>(number);
  }
  MLA_DEVICE int plan_parts() const { return warp_uniform(__ldg(params_.plan + PlanHeader::num_sm_parts)); }
  MLA_DEVICE const int32_t* bounds() const {
    return params_.plan + warp_uniform(__ldg(params_.plan + PlanHeader::work_indptr));
  }

  // Opens the first SM part with tiles from `part` on, in steps of the launch's parts.
  MLA_DEVICE void open_part(int part) const {
    const int count = plan_parts();
    for (; part < count; part += params_.grid_stride) {
      const int first = warp_uniform(__ldg(bounds() + part));
      write(CURSOR, first);
      if (first < warp_uniform(__ldg(bounds() + part + 1))) break;
    }
    write(PART, part);
  }

  const Params& params_;
  uint32_t scratch_;
};

}  // namespace mla::sm_90
