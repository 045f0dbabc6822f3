// Decode of an e4m3 cache by the source of csrc/sm_90/decode/swap_ab on a CPU, compared with fp64 (dense_case.hpp). DTYPE and
// Q_ROWS are the instance's. `what` may be wide, too (bf16 rows from 2^-60 to 2^60).
#include <type_traits>

#include "block.hpp"
#include "dense_case.hpp"
#include "sm_90/decode/swap_ab/kernel.hpp"
#include "sm_90/decode/swap_ab/mainloop.hpp"
#include "sm_90/decode/swap_ab/producer.hpp"

namespace {

using namespace mla;
using namespace mla::sm_90;
using Traits = SwapAbTraits<SwapAbProblem<DTYPE>, SwapAbPolicy<Q_ROWS>>;
using Kernel = SwapAbKernel<Traits, TileScheduler, SwapAbProducer, SwapAbMainloop, SwapAbEpilogue>;
constexpr bool IS_FP8 = std::is_same_v<DTYPE, fp8>, IS_BF16 = std::is_same_v<DTYPE, bf16>;

struct Case : DenseCase {
  uint8_t* cache = nullptr;
  uint8_t* q = nullptr;
  float kv_descale = 0.7f;

  void fill() {
    fill_cache();
    fill_queries();
    fill_params(q, cache);
    if (IS_FP8) params.q_descale = &q_descale;
    params.kv_descale = &kv_descale;
    bf16_results = IS_BF16 || IS_FP8;
    score_scale = value_scale = kv_descale;
  }

  void fill_cache() {
    const size_t bytes = fill_table() * page * WIDTH;
    cache = aligned<uint8_t>(bytes);
    // Any finite e4m3 below 8: most of them small, as values are.
    for (size_t i = 0; i < bytes; ++i) cache[i] = random() % 0x50 | (random() & 1) << 7;
    for (int sequence = 0; sequence < batch; ++sequence) {
      std::vector<double>& own = keys.emplace_back();
      for (int k = 0; k < width * page; ++k) {
        uint8_t* key = cache + slot(sequence, k) * WIDTH;
        if (absent(sequence, k)) std::memset(key, 0x7F, WIDTH);  // NaN
        for (int c = 0; c < WIDTH; ++c) own.push_back(e4m3_to_float(key[c]));
      }
    }
  }

  void fill_queries() {
    const size_t count = static_cast<size_t>(batch) * rows * WIDTH;
    q = aligned<uint8_t>(count * 2);
    for (size_t i = 0; i < count; ++i) {
      float value = normal(random);
      if (what == "wide" && IS_BF16) value = std::ldexp(value, static_cast<int>(i / WIDTH % 61) * 2 - 60);
      if (IS_FP8) {
        q[i] = random() % 0x48 | (random() & 1) << 7;
        value = e4m3_to_float(q[i]);
      } else {
        const uint16_t bits = IS_BF16 ? float_to_bf16(value) : float_to_fp16(value);
        std::memcpy(q + 2 * i, &bits, 2);
        value = IS_BF16 ? bf16_to_float(bits) : fp16_to_float(bits);
      }
      q_values.push_back(value);
    }
  }
};

}  // namespace

int main(int argc, char** argv) { return run_program<Case, Kernel>(argc, argv); }
