// Decode of rows of D_QK values with latents of D_V by the source of csrc/sm_90/decode on a CPU, compared with fp64
// (dense_case.hpp, whose `what` may have large or small as well: queries that fp16 does not hold). DTYPE, KV_SOURCE and
// SCALE_Q are the instance's. In keys that no sequence owns lies NaN. The cache and the queries end where none can be read.
#include <type_traits>

#include "block.hpp"
#include "dense_case.hpp"
#include "sm_90/decode/kernel.hpp"
#include "sm_90/decode/producer_cp_async.hpp"
#include "sm_90/decode/producer_fp8.hpp"
#include "sm_90/decode/producer_tma.hpp"

#ifndef SCALE_Q
#define SCALE_Q 0
#endif

namespace {

using namespace mla;
using namespace mla::sm_90;
constexpr KvLoad LOAD = KvLoad::KV_SOURCE;
constexpr bool FP8_KEYS = LOAD == KvLoad::fp8 || LOAD == KvLoad::fp8_scores, FP8_Q = std::is_same_v<DTYPE, fp8>;
constexpr int KEY_SIZE = FP8_KEYS ? 1 : 2, Q_SIZE = FP8_Q ? 1 : 2;
using Traits = DecodeTraits<DecodeProblem<DTYPE, WIDTH, false, VALUES>,
                            DecodePolicyOf<LOAD, ClusterNone, WIDTH, false, SCALE_Q>>;
template <class T, class Scheduler>
using Producer = std::conditional_t<
    T::LOAD == KvLoad::tma, ProducerTma<T, Scheduler>,
    std::conditional_t<T::CONVERTS_KEYS, ProducerFp8<T, Scheduler>, ProducerCpAsync<T, Scheduler>>>;
using Kernel = DecodeKernel<Traits, TileScheduler, Producer>;

struct Case : DenseCase {
  uint8_t* cache = nullptr;
  uint8_t* q = nullptr;
  float kv_descale = 0.7f, q_size = 1.0f;

  void fill() {
    fill_cache();
    fill_queries();
    fill_params(q, cache);
    params.softmax_scale /= q_size;
    if (FP8_Q) params.q_descale = &q_descale;
    if (FP8_KEYS) {
      params.kv_descale = &kv_descale;
      score_scale = value_scale = kv_descale;
    }
    if (!FP8_Q) map_queries<Traits>(q);
    if constexpr (LOAD == KvLoad::tma || LOAD == KvLoad::fp8_scores) map_keys<Traits>(cache);
  }

  // Draws a value, stores it as it is cached or asked with, and returns what was stored.
  float draw(uint8_t* to, bool e4m3, float size = 1.0f) {
    if (e4m3) {
      *to = random() % 0x50 | (random() & 1) << 7;
      return e4m3_to_float(*to);
    }
    const uint16_t bits = float_to_bf16(normal(random) * size);
    std::memcpy(to, &bits, 2);
    return bf16_to_float(bits);
  }

  void fill_cache() {
    const size_t slots = fill_table() * page;
    cache = before_a_fence<uint8_t>(slots * WIDTH * KEY_SIZE);
    std::memset(cache, 0xFF, slots * WIDTH * KEY_SIZE);  // NaN in both types
    for (int sequence = 0; sequence < batch; ++sequence) {
      std::vector<double>& own = keys.emplace_back();
      for (int k = 0; k < lens[sequence]; ++k)
        for (int c = 0; c < WIDTH; ++c)
          own.push_back(draw(cache + (slot(sequence, k) * WIDTH + c) * KEY_SIZE, FP8_KEYS));
    }
  }

  void fill_queries() {
    fill_counts();
    const size_t count = static_cast<size_t>(first_tokens.back()) * heads * WIDTH;
    q = before_a_fence<uint8_t>(count * Q_SIZE);
    q_size = has("large") ? 0x1p20f : has("small") ? 0x1p-40f : 1.0f;
    for (size_t i = 0; i < count; ++i) q_values.push_back(draw(q + i * Q_SIZE, FP8_Q, q_size));
  }
};

}  // namespace

int main(int argc, char** argv) { return run_program<Case, Kernel>(argc, argv); }
