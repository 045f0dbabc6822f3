// Loads of what nothing writes while a kernel runs.
#pragma once

#include "common/device.hpp"

namespace mla {

// Returns what lies at an address that is the same in all lanes: by a scalar load, where the compiler, which cannot know
// that nothing writes there, would take a vector load.
template <class T>
MLA_DEVICE T read_constant(const T* at) {
  return *(const __attribute__((address_space(4))) T*)at;
}

}  // namespace mla
