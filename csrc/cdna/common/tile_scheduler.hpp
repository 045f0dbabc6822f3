// The tile scheduler: which KV splits of which sequences a workgroup processes.
#pragma once

#include "cdna/common/cross_lane.hpp"
#include "cdna/common/kernel_params.hpp"
#include "common/params/decode.hpp"
#include "common/params/sparse_decode.hpp"
#include "common/plan_header.hpp"
#include "common/split_keys.hpp"
#include "common/work_tile.hpp"

namespace cdna {

// The units that an operator's work tiles split: sequences or query tokens. `word` treats a word of the plan, which is
// the same in all lanes. Decode leaves it where the compiler likes: a scalar register costs 5 to 20 instructions more
// there (LLVM 22; gfx942 with 16 rows of 16-bit values takes 12 fewer). Sparse decode moves it to a scalar register, or
// it would take up to 5 more vector registers.
struct DecodeSequences {
  using Params = mla::DecodeParams;
  MLA_DEVICE static int count(const Params& p) { return p.batch; }
  MLA_DEVICE static int word(int x) { return x; }
};
struct SparseQueryTokens {
  using Params = mla::SparseDecodeParams;
  MLA_DEVICE static int count(const Params& p) { return p.tokens; }
  MLA_DEVICE static int word(int x) { return uniform(x); }
};

// The work tiles of one workgroup. With a plan it takes every grid_stride-th SM part of the plan, so any number of
// workgroups processes all of it. Without a plan it takes every grid_stride-th of `num_splits` splits per sequence,
// which are equal or of the keys that split_size says.
template <class Sequences>
class TileScheduler {
  using Params = typename Sequences::Params;

 public:
  MLA_DEVICE TileScheduler(const Params& p, int workgroup) : part_(workgroup), next_(0), end_(0) {
    loaded(p.plan, Sequences::count(p), p.num_splits);
    if (p.plan) {
      open_part(p);
    } else {
      next_ = workgroup;
      end_ = Sequences::count(p) * p.num_splits;
    }
  }

  MLA_DEVICE bool has_next() const { return next_ < end_; }

  // Returns the sequence of the next work tile.
  MLA_DEVICE int sequence(const Params& p) const {
    if (p.plan) return Sequences::word(tile_info(p)[0]);
    return static_cast<int>(static_cast<uint32_t>(next_) / static_cast<uint32_t>(p.num_splits));
  }

  // Returns the next work tile and advances; `keys_of(sequence)` gives the length of a sequence in keys.
  template <class KeysOf>
  MLA_DEVICE mla::WorkTile fetch_next(const Params& p, const KeysOf& keys_of) {
    mla::WorkTile tile;
    int keys;
    if (p.plan) {
      const int32_t* words = tile_info(p);
      tile = mla::WorkTile{Sequences::word(words[0]), Sequences::word(words[1]), Sequences::word(words[2]),
                           Sequences::word(words[3])};
      if (++next_ == end_) {
        part_ += p.grid_stride;
        open_part(p);
      }
      keys = keys_of(tile.sequence);
    } else {
      tile.sequence = sequence(p);
      keys = keys_of(tile.sequence);
      const int split = next_ - tile.sequence * p.num_splits;
      const int length = p.split_size > 0 ? mla::split_keys(p.split_size, keys) : split_length(p, keys);
      tile.first_key = split * length;
      tile.end_key = split + 1 == p.num_splits ? mla::PlanHeader::open_end : tile.first_key + length;
      tile.partial_row = p.num_splits > 1 ? next_ : -1;
      next_ += p.grid_stride;
    }
    tile.end_key = tile.end_key < keys ? tile.end_key : keys;
    return tile;
  }

 private:
  static constexpr uint32_t SPLIT_ALIGNMENT = 64;  // keys; equal splits are multiples of it

  MLA_DEVICE static int split_length(const Params& p, int keys) {
    const uint32_t splits = static_cast<uint32_t>(p.num_splits);
    const uint32_t even = (static_cast<uint32_t>(keys) + splits - 1) / splits;
    return static_cast<int>(even < 1 ? SPLIT_ALIGNMENT
                                     : (even + SPLIT_ALIGNMENT - 1) / SPLIT_ALIGNMENT * SPLIT_ALIGNMENT);
  }

  MLA_DEVICE const int32_t* tile_info(const Params& p) const {
    const int work_tiles = Sequences::word(p.plan[mla::PlanHeader::work_tiles]);
    return p.plan + work_tiles + static_cast<int64_t>(next_) * mla::PlanHeader::work_tile_words;
  }

  // Finds the first part with work tiles from part_ on, in steps of the launch's workgroups.
  MLA_DEVICE void open_part(const Params& p) {
    const int32_t* bounds = p.plan + Sequences::word(p.plan[mla::PlanHeader::work_indptr]);
    const int parts = Sequences::word(p.plan[mla::PlanHeader::num_sm_parts]);
    for (; part_ < parts; part_ += p.grid_stride) {
      next_ = Sequences::word(bounds[part_]);
      end_ = Sequences::word(bounds[part_ + 1]);
      if (next_ < end_) return;
    }
    next_ = end_;
  }

  int part_, next_, end_;
};

}  // namespace cdna
