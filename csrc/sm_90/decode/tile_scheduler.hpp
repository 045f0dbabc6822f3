// The tile scheduler: which keys of which sequence a block takes next. Every role of a block walks the same list.
#pragma once

#include "common/division.hpp"
#include "common/plan_header.hpp"
#include "common/split_keys.hpp"
#include "sm_90/combine/sentinel.hpp"
#include "sm_90/decode/node_state.hpp"
#include "sm_90/decode/query_rows.hpp"
#include "sm_90/split_fold.hpp"

namespace mla::sm_90 {

// Four words of a plan. Its tiles begin at multiples of 16 bytes from the plan's first word, which a caller may have
// put at any multiple of 4 bytes.
MLA_DEVICE int4 load_plan_tile(const int32_t* words) {
  if (reinterpret_cast<uintptr_t>(words) % 16 == 0) return __ldg(reinterpret_cast<const int4*>(words));
  return make_int4(__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3));
}

// Whether each CTA has at most one SM part of a plan. Otherwise a cluster has no last tiles to merge.
MLA_DEVICE bool one_part_each(const DecodeTmaParams& params, int plan_parts) {
  return plan_parts <= params.grid_stride;
}
MLA_DEVICE bool walks_backwards(const DecodeTmaParams& params, int part, int plan_parts) {
  return part % 2 != 0 && one_part_each(params, plan_parts);
}

// Rows that walk one list of work tiles: two row tiles that share keys do.
template <class Traits>
constexpr int LIST_ROWS = Traits::Cluster::SHARES_KV ? 2 * BLOCK_M : BLOCK_M;

// Split `number` of a sequence, without a plan. Splits are multiples of `block` keys, so that only the last one has
// unused keys in a stage. They count from the origin of a window that begins at key `begin`.
// With NODES split_size is of nodes, whose splits the CTA folds.
template <bool NODES>
struct EvenSplit {
  int first;
  int end;
  MLA_DEVICE EvenSplit(const DecodeTmaParams& params, int number, int length, int begin, int block) {
    const int splits = params.num_splits, origin = window_origin(begin), keys = length - origin;
    int size = NODES ? params.split_size : split_keys(params.split_size, keys);
    if (size == 0) {
      const uint32_t blocks = (keys + block - 1) / block;
      size = divided(blocks + splits - 1, params.splits_reciprocal, params.splits_shift) * block;
    }
    const int64_t before = static_cast<int64_t>(number) * size;
    const int left = before < keys ? keys - static_cast<int>(before) : 0;
    // The last split is open: with split_size, a sequence longer than num_splits * split_size is still whole.
    end = number + 1 == splits || size > left ? length : length - left + size;
    first = max(length - left, begin);
  }
};

// The tiles of a plan in the order of SM parts, or even splits: sequence i / num_splits, split i % num_splits. With
// PAIRED the tiles are a plan's, and odd SM parts are walked backwards: so the last tiles of parts 2k and 2k + 1, which
// a cluster walks, are neighbours (plan_pair.hpp). A tile is resolved in two steps. `fetch_next` gives its sequence,
// which is all that its queries need; `resolve_bounds` gives its keys, which takes the sequence's length from memory.
// Both are chains of dependent loads, so a role that walks the list resolves the next tile where it has to wait for
// something anyway.
//
// With FOLDS a plan's splits are batch-invariant. Those of a node, from its first on and as far as this SM part has them,
// are one tile, which the CTA folds; a node's other splits are tiles of their own, since they are added in order.
//
// With ROWS a tile is without the keys that none of so many rows of the block sees: those of an extend's later tokens,
// and those before a window.
template <bool PAIRED, bool FOLDS = false, int ROWS = 0>
class TileSchedulerOf {
 public:
  using Params = DecodeTmaParams;

  // Walks the list of SM part `part`, for a block whose rows begin at `first_row`. A plan's split points are rounded
  // down to multiples of `split_alignment`, so that a load never straddles a page. Even splits are multiples of `block`
  // keys, so that only a sequence's last stage has unused keys.
  MLA_DEVICE TileSchedulerOf(const Params& params, int part, int first_row, int split_alignment, int block)
      : params_(params), first_row_(first_row), split_alignment_(split_alignment), block_(block), part_(part) {
    if (params.plan != nullptr) {
      // The header is loaded beside this part's bounds, since no address here depends on a loaded value. Past the
      // plan's parts a bound reads some other word of the plan, which has room for as many tiles as the launch has
      // parts.
      const int parts = ld_global(params.plan + PlanHeader::num_sm_parts),
                tiles = ld_global(params.plan + PlanHeader::work_tiles);
      load_bounds();
      plan_parts_ = warp_uniform(parts);
      tiles_ = warp_uniform(tiles);
    } else {
      cursor_ = part;
      limit_ = params.batch * params.num_splits;
    }
    fetch_next();
  }

  // Whether there is a tile; false at the end of the list.
  MLA_DEVICE bool more() const { return more_; }

  // PAIRED: whether the tile fetched last is the last of the CTA's only SM part.
  MLA_DEVICE bool ends_part() const { return more_ && cursor_ >= limit_; }

  // The tile fetched last. Until `resolve_bounds`, only its sequence and partial row are valid.
  MLA_DEVICE const WorkTile& tile() const { return tile_; }

  // Advances to the next tile that has rows for this block.
  MLA_DEVICE void fetch_next() {
    do more_ = advance();
    while (more_ && params_.cu_seqlens_q != nullptr &&
           first_row_ >= Queries(params_, tile_.sequence).count * params_.heads);
  }

  MLA_DEVICE void resolve_bounds() {
    if (!more_) return;
    tile_.length = warp_uniform(ld_global(params_.seq_lens + tile_.sequence));
    const int begin = first_read(params_, tile_.sequence, tile_.length);
    if (params_.plan != nullptr) {
      const int origin = window_origin(begin), keys = tile_.length - origin;
      const bool open = tile_.end_key == PlanHeader::open_end;
      const int end = open ? tile_.end_key : aligned(tile_.end_key);
      tile_.first_key = max(origin + min(aligned(tile_.first_key), keys), begin);
      tile_.end_key = origin + min(end, keys);
    } else {
      const EvenSplit<FOLDS> split(params_, tile_.first_key, tile_.length, begin, block_);
      tile_.first_key = split.first;
      tile_.end_key = split.end;
    }
    if (ROWS != 0 && params_.q_len > BLOCK_N) clip_to_seen();  // fewer tokens hide less than a stage from each other
  }

  // FOLDS: tells combine about a tile that is several splits. If these are their whole sequence, the result is stored, and
  // the log-sum-exp of the first split becomes SENTINEL. Else the first split's partial is the state of all of them, and
  // the log-sum-exps of the others become -inf, as if they had no keys. Called by a whole warp for all rows of the block.
  MLA_DEVICE void tell_combine() const {
    if (joined_ == 1) return;
    const int lane = thread_id() % 32;
#pragma unroll 1
    for (int row = first_row() + lane; row < min(first_row() + BLOCK_M, params_.rows); row += 32) {
      if (tile_.partial_row < 0) {
        const int first = ld_global(params_.plan + PlanHeader::words + tile_.sequence);
        *state_of(params_, first, row) = bit_cast<float>(SENTINEL);
        continue;
      }
      float* state = state_of(params_, tile_.partial_row, row);
#pragma unroll 1
      for (int split = 1; split < joined_; ++split) {
        state += 2 * params_.rows;
        *state = -bit_cast<float>(INFINITY_BITS);
      }
    }
  }

  // Fetches the tile after this one and resolves it.
  MLA_DEVICE void next() {
    fetch_next();
    resolve_bounds();
  }

  // Prefetches the first page numbers of the tile's sequence into L1, before it is known which are needed.
  MLA_DEVICE void prefetch_pages() const { prefetch_pages_from(0); }

  // The same from a window's first page on, once the tile's keys are known.
  MLA_DEVICE void prefetch_window_pages() const {
    if (!HAS_MASKS || params_.window_left < 0) return;
    prefetch_pages_from(divided(tile_.first_key, params_.page_reciprocal, params_.page_shift));
  }

 private:
  MLA_DEVICE void prefetch_pages_from(int entry) const {
    const int line = entry + thread_id() % 32 * 32;
    if (more_ && line < params_.page_ids_width)
      prefetch_l1(params_.page_ids + tile_.sequence * params_.page_ids_stride + line);
  }

  // The first of the rows exists, and sees no key before the others' windows; the last sees all keys that any of them
  // does. A rank's share of a sequence stays whole, since to count it takes divisions in every role.
  MLA_DEVICE void clip_to_seen() {
    const Heads heads(params_);
    const int count = Queries(params_, tile_.sequence).count;
    if (params_.causal && params_.cp_tot_seq_lens == nullptr && !(HAS_MASKS && params_.tree_mask != nullptr)) {
      const int last = heads.token(min(first_row_ + ROWS, count * params_.heads) - 1);
      tile_.end_key = max(min(tile_.end_key, tile_.length - (count - 1 - last)), tile_.first_key);
    }
    if constexpr (HAS_MASKS)
      tile_.first_key =
          max(tile_.first_key, first_key(tile_.length, count - heads.token(first_row_), params_.window_left));
  }

  MLA_DEVICE int aligned(int key) const { return key / split_alignment_ * split_alignment_; }

  MLA_DEVICE bool advance() {
    if (params_.plan != nullptr) {
      while (cursor_ >= limit_ || part_ >= plan_parts_) {
        part_ += params_.grid_stride;
        if (part_ >= plan_parts_) return false;
        load_bounds();
      }
      const int tile = PAIRED && walks_backwards(params_, part_, plan_parts_) ? --limit_ : cursor_++;
      const int4 words = load_plan_tile(params_.plan + tiles_ + PlanHeader::work_tile_words * tile);
      tile_.sequence = warp_uniform(words.x);
      tile_.first_key = warp_uniform(words.y);
      tile_.end_key = warp_uniform(words.z);
      tile_.partial_row = warp_uniform(words.w);
      if constexpr (FOLDS) join_node();
      return true;
    }
    if (cursor_ >= limit_) return false;
    tile_.sequence = divided(cursor_, params_.splits_reciprocal, params_.splits_shift);
    tile_.first_key = cursor_ - tile_.sequence * params_.num_splits;  // the split's number, until resolve_bounds
    tile_.partial_row = params_.num_splits > 1 ? cursor_ : -1;
    cursor_ += params_.grid_stride;
    return true;
  }

  // Makes one tile of the splits behind the one fetched that this CTA may fold with it. A sink is left to combine, which
  // divides by it otherwise.
  MLA_DEVICE void join_node() {
    joined_ = 1;
    if (tile_.partial_row < 0 || params_.split_size != params_.fold_size) return;
    if (static_cast<uint32_t>(tile_.first_key) % (NODE_SPLITS * params_.fold_size) != 0) return;
#pragma unroll 1
    for (; joined_ < NODE_SPLITS && cursor_ < limit_; ++joined_, ++cursor_) {
      const int4 words = load_plan_tile(params_.plan + tiles_ + PlanHeader::work_tile_words * cursor_);
      if (warp_uniform(words.x) != tile_.sequence || warp_uniform(words.y) != tile_.end_key) break;
      tile_.end_key = warp_uniform(words.z);
    }
    const bool whole = tile_.first_key == 0 && tile_.end_key == PlanHeader::open_end;
    if (whole && joined_ > 1 && params_.attn_sink == nullptr) tile_.partial_row = -1;
  }

  MLA_DEVICE void load_bounds() {
    const int32_t* bounds = params_.plan + PlanHeader::work_indptr_at(params_.batch) + part_;
    const int begin = ld_global(bounds), end = ld_global(bounds + 1);
    cursor_ = warp_uniform(begin);
    limit_ = warp_uniform(end);
  }

  const Params& params_;
  int first_row_;
  int split_alignment_;
  int block_;
  int part_;
  int cursor_ = 0;
  int limit_ = 0;
  int plan_parts_ = 0;
  int tiles_ = 0;  // where a plan's tiles begin
  int joined_ = 1;  // FOLDS: splits of the tile
  WorkTile tile_;
  bool more_;
};

using TileScheduler = TileSchedulerOf<false>;

// That of an instance. With ClusterExchangeP each CTA works out which keys the other has, so both keep the whole split.
template <class Traits>
using TileSchedulerFor =
    TileSchedulerOf<Traits::Cluster::MERGES_LAST, Traits::FOLDS, Traits::Cluster::EXCHANGES_P ? 0 : LIST_ROWS<Traits>>;

// The list of this block. Two row tiles that share keys walk the list of the first of them: where a sequence has no rows
// for the second, this one computes rows that nobody stores.
template <class Traits, class Scheduler>
MLA_DEVICE Scheduler make_scheduler(const DecodeTmaParams& params) {
  return Scheduler(params, blockIdx.y, first_row() & -LIST_ROWS<Traits>, Traits::SPLIT_ALIGNMENT, BLOCK_N);
}

}  // namespace mla::sm_90
