// The control data that passes between the roles of a block: work tiles and their flags, positions in rings, and the
// commands to the PV warpgroups.
#pragma once

#include "common/device.hpp"

// Defined by an instance with windows and trees (arch.toml).
#ifndef MASKED
#define MASKED 0
#endif

namespace mla::sm_90 {

// Whether window_left and tree_mask are looked at. Their code makes a short call up to 8 % longer, so most instances
// are without.
constexpr bool HAS_MASKS = MASKED != 0;


// Which keys of which sequence a block attends to, and where its result goes. It is mla::WorkTile with the sequence's
// length, which masks need.
struct WorkTile {
  int sequence;
  int length;       // keys of the sequence, as the kernel reads it
  int first_key;
  int end_key;      // exclusive, clipped at `length`; <= first_key when there is nothing to do
  int partial_row;  // row of partial_out, or -1: the result is final
  MLA_DEVICE int keys() const { return end_key > first_key ? end_key - first_key : 0; }
  // Where stages of keys begin, if these do at multiples of ALIGNMENT keys: a window may begin between them, and what
  // lies before it is in memory that may hold anything. `end_key` of a tile without keys.
  template <int ALIGNMENT>
  MLA_DEVICE int first_stage() const {
    if constexpr (!HAS_MASKS) return first_key;
    return first_key < end_key ? first_key & -ALIGNMENT : end_key;
  }
};

// Position in a ring of STAGES buffers: the stage, and the parity of the mbarrier phase that it is in.
template <int STAGES>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  MLA_DEVICE void next(int stages = STAGES) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The command to a PV warp for a P stage, as flags: RESCALE O, then MULTIPLY; LAST marks the tile's last product;
// FINISH the tile with the stage's reciprocal denominators; Q_PASSED goes with FINISH where two stages of queries went
// through the ring although the tile has no keys; STOP ends the role. MERGE goes with LAST or FINISH where the two CTAs
// of a cluster merge this tile and the peer's (ClusterReduceLast); it is the CTA's last. FOLDED goes with FINISH where the
// tile has had a split before, GOES_ON where it has another (fold.hpp).
enum MmaCommand : int {
  MULTIPLY = 1,
  RESCALE = 2,
  LAST = 4,
  FINISH = 8,
  Q_PASSED = 16,
  STOP = 32,
  MERGE = 64,
  FOLDED = 128,
  GOES_ON = 256
};

// The flags that the producer publishes with a work tile: its queries are loaded even if it has no keys; or the list of
// tiles has ended, and this is no tile; or the cluster merges it with the peer's.
enum TileInfo : int { Q_LOADED = 1, END_OF_WORK = 2, MERGED_WITH_PEER = 4 };

}  // namespace mla::sm_90
