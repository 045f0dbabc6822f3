// The narrow floats as tables, and which flavour an arch means by "fp8" and "bf8".
#pragma once
#include "numbers.hpp"
#include "program.hpp"

namespace emulator {

const float* narrow_values(Narrow format);    // indexed by code
Narrow eight_bit(const Inst& in, bool e5m2);  // FNUZ on gfx942, OCP on gfx950

}  // namespace emulator
