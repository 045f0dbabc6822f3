#pragma once
#include "wave.hpp"

namespace emulator {

constexpr int MAX_THREADS = 16;
void run_launch(Launch& launch);

}  // namespace emulator
