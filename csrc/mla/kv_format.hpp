// How the values of a cached row are stored, and in which type the query meets them.
#pragma once

#include "mla/device.hpp"

namespace mla {

// Names of 16-bit element types; a kernel carries the bits in integers and Policy knows the instructions.
struct bf16 {
  static constexpr int bytes = 2;
};
struct fp16 {
  static constexpr int bytes = 2;
};

// The cache holds the query's own type: a row is read as it is multiplied.
template <class Element_>
struct SameAsQuery {
  using Query = Element_;
  static constexpr int bytes = Element_::bytes;
};

}  // namespace mla
