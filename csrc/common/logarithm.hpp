// Between the natural logarithm of lse and the base of the hardware's exponentials.
#pragma once

namespace mla {

constexpr float LOG2_E = 1.44269504f;          // log2(e)
constexpr float LOG2_E_REST = 1.92596299e-8f;  // log2(e) - LOG2_E
constexpr float LN_2 = 0.693147181f;           // 1 / log2(e)

}  // namespace mla
