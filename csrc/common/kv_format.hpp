// How the values of a cached row are stored, and in which type the query meets them.
#pragma once

#include "common/device.hpp"

namespace mla {

// Names of element types; a kernel carries the bits in integers and Policy knows the instructions.
struct bf16 {
  static constexpr int bytes = 2;
};
struct fp16 {
  static constexpr int bytes = 2;
};
struct fp8 {  // e4m3 in the flavour of the arch's instructions
  static constexpr int bytes = 1;
};

// The cache holds the type the products are made in, and so does the query: a row is read as it is multiplied.
template <class Element>
struct SameAsQuery {
  using Query = Element;        // of the products
  using StoredQuery = Element;  // in memory
  static constexpr int bytes = Element::bytes;
  static constexpr bool descaled = false;
};

// The cache holds fp8 with one descale per tensor, the query bf16 or fp8 with one of its own. Every fp8 value is a bf16
// value, so the products are made in bf16 and the descales multiply scores and outputs.
template <class StoredQuery_>
struct Fp8Cache {
  using Query = bf16;
  using StoredQuery = StoredQuery_;
  static constexpr int bytes = fp8::bytes;
  static constexpr bool descaled = true;
};

MLA_DEVICE float descale(const float* factor) { return factor ? *factor : 1.0f; }

}  // namespace mla
