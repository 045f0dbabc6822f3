#pragma once
#include "program.hpp"

namespace emulator {

// Null, with the index of the first bad record and a sentence, if a record makes no sense.
Program* build_program(const Record* records, int count, int arch, int* bad, const char** reason);
void free_program(Program* program);

}  // namespace emulator
