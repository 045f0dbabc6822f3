// Which keys of which sequence a block attends to, and where its result goes. It is mla::WorkTile with the sequence's
// length, which masks need.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

struct WorkTile {
  int sequence;
  int length;       // keys of the sequence, as the kernel reads it
  int first_key;
  int end_key;      // exclusive, clipped at `length`; <= first_key when there is nothing to do
  int partial_row;  // row of partial_out, or -1: the result is final
  MLA_DEVICE int keys() const { return end_key > first_key ? end_key - first_key : 0; }
};

}  // namespace mla::sm_90
