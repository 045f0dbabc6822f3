// Addresses of a buffer instruction, and how much of each lane's access lies inside the resource.
#pragma once
#include "global.hpp"

namespace emulator {

struct BufferLanes {
  u64 address[LANES];
  u32 valid[LANES];  // bytes in range, from the start
};
const char* buffer_operands(Inst& in);  // `source` becomes the index of the address operand
void buffer_addresses(Wave& wave, const Inst& in, u32 bytes, BufferLanes& out);

}  // namespace emulator
