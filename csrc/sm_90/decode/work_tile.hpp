// One unit of a block's work: some keys of a sequence.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

struct WorkTile {
  int sequence;
  int length;       // keys of the sequence, as the kernel reads it
  int first;        // first key of the tile
  int end;          // one past its last key; not above `first` when the tile is empty
  int partial_row;  // row of partial_out, or -1: the tile is the whole sequence
  MLA_DEVICE int keys() const { return end > first ? end - first : 0; }
};

}  // namespace mla::sm_90
