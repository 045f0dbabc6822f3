// Which keys of which sequence a workgroup attends to, and where its result goes.
#pragma once

namespace mla {

struct WorkTile {
  int sequence;
  int first_key;
  int end_key;      // exclusive, already clipped at the sequence's length; <= first_key when there is nothing to do
  int partial_row;  // row of partial_out, or -1: the result is final
};

}  // namespace mla
