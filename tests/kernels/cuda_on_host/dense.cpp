// Decode of rows of D_QK values with latents of D_V by the source of csrc/sm_90/decode on a CPU, compared with fp64
// (dense_case.hpp, whose `what` may have large or small as well: queries that fp16 does not hold). DTYPE, KV_SOURCE, SCALE_Q,
// FOLD, CLUSTER_MODE and UNROTATED, of un-rotated caches, are the instance's. In keys that no sequence owns lies NaN. The cache and the queries
// end where none can be read, and so does rope_cos_sin, with the longest sequence.
#include <type_traits>

#include "block.hpp"
#include "dense_case.hpp"
#include "sm_90/decode/cluster/modes.hpp"
#include "sm_90/decode/kernel.hpp"
#include "sm_90/decode/producer_cp_async.hpp"
#include "sm_90/decode/producer_fp8.hpp"
#include "sm_90/decode/producer_tma.hpp"
#include "sm_90/decode/producer_tma_exchange.hpp"
#include "sm_90/decode/producer_tma_rotated.hpp"

#ifndef SCALE_Q
#define SCALE_Q 0
#endif
#ifndef FOLD
#define FOLD 0
#endif
#ifndef UNROTATED
#define UNROTATED 0
#endif
#ifndef CLUSTER_MODE
#define CLUSTER_MODE none
#endif

namespace {

using namespace mla;
using namespace mla::sm_90;
constexpr KvLoad LOAD = KvLoad::KV_SOURCE;
constexpr bool FP8_KEYS = LOAD == KvLoad::fp8 || LOAD == KvLoad::fp8_scores, FP8_Q = std::is_same_v<DTYPE, fp8>;
constexpr bool FP16 = std::is_same_v<DTYPE, fp16>;
constexpr int KEY_SIZE = FP8_KEYS ? 1 : 2, Q_SIZE = FP8_Q ? 1 : 2, ROPE = WIDTH - VALUES, HALF = ROPE / 2;
using Traits = DecodeTraits<DecodeProblem<DTYPE, WIDTH, UNROTATED, VALUES>,
                            DecodePolicyOf<LOAD, cluster_mode::CLUSTER_MODE, WIDTH, UNROTATED, SCALE_Q, FOLD>>;
template <class T, class Scheduler>
using ProducerOfBoxes = std::conditional_t<
    UNROTATED, ProducerTmaRotated<T, Scheduler>,
    std::conditional_t<T::Cluster::EXCHANGES_P, ProducerTmaExchange<T, Scheduler>, ProducerTma<T, Scheduler>>>;
template <class T, class Scheduler>
using Producer = std::conditional_t<
    T::LOAD == KvLoad::tma, ProducerOfBoxes<T, Scheduler>,
    std::conditional_t<T::CONVERTS_KEYS, ProducerFp8<T, Scheduler>, ProducerCpAsync<T, Scheduler>>>;
using Kernel = DecodeKernel<Traits, TileSchedulerFor<Traits>, Producer>;

struct Case : DenseCase {
  uint8_t* cache = nullptr;
  uint8_t* q = nullptr;
  float* cos_sin = nullptr;
  float kv_descale = 0.7f, q_size = 1.0f;

  void fill() {
    list_rows = LIST_ROWS<Traits>;
    if (UNROTATED) fill_cos_sin();
    fill_cache();
    fill_queries();
    fill_params(q, cache);
    if (Traits::Cluster::MERGES_SPLITS) merge_in_pairs();
    bf16_results = !FP16;
    params.softmax_scale /= q_size;
    params.rope_cos_sin = cos_sin;
    if (FP8_Q) params.q_descale = &q_descale;
    if (FP8_KEYS) {
      params.kv_descale = &kv_descale;
      score_scale = value_scale = kv_descale;
    }
    if (!FP8_Q) map_queries<Traits>(reinterpret_cast<const uint16_t*>(q));
    if constexpr (LOAD == KvLoad::tma || LOAD == KvLoad::fp8_scores) map_keys<Traits>(cache);
  }

  // Draws a value, stores it as it is cached or asked with, and returns what was stored.
  float draw(uint8_t* to, bool e4m3, float size = 1.0f) {
    if (e4m3) {
      *to = random() % 0x50 | (random() & 1) << 7;
      return e4m3_to_float(*to);
    }
    const float value = normal(random) * size;
    const uint16_t bits = FP16 ? float_to_fp16(value) : float_to_bf16(value);
    std::memcpy(to, &bits, 2);
    return FP16 ? fp16_to_float(bits) : bf16_to_float(bits);
  }

  void fill_cos_sin() {
    const int positions = *std::max_element(lens.begin(), lens.end());
    cos_sin = before_a_fence<float>(static_cast<size_t>(positions) * ROPE);
    for (int position = 0; position < positions; ++position)
      for (int i = 0; i < HALF; ++i) {
        const double angle = position * std::pow(10000.0, -i / static_cast<double>(HALF));
        cos_sin[position * ROPE + i] = static_cast<float>(std::cos(angle));
        cos_sin[position * ROPE + HALF + i] = static_cast<float>(std::sin(angle));
      }
  }
  // In fp32, each result of an operation rounded, and the rotated values to the type of the cache.
  void rotate(double* rope, int position) const {
    const float* angles = cos_sin + static_cast<size_t>(position) * ROPE;
    const auto rounded = [](double exact) { return static_cast<float>(exact); };
    const auto stored = [](float value) {
      return FP16 ? fp16_to_float(float_to_fp16(value)) : bf16_to_float(float_to_bf16(value));
    };
    for (int i = 0; i < HALF; ++i) {
      const double low = rope[i], high = rope[HALF + i], cos = angles[i], sin = angles[HALF + i];
      rope[i] = stored(rounded(low * cos) - rounded(high * sin));
      rope[HALF + i] = stored(rounded(high * cos) + rounded(low * sin));
    }
  }

  void fill_cache() {
    const size_t slots = fill_table() * page;
    cache = before_a_fence<uint8_t>(slots * WIDTH * KEY_SIZE);
    std::memset(cache, 0xFF, slots * WIDTH * KEY_SIZE);  // NaN in all types
    for (int sequence = 0; sequence < batch; ++sequence) {
      std::vector<double>& own = keys.emplace_back(static_cast<size_t>(lens[sequence]) * WIDTH, NAN);
      for (int k = first_read(sequence); k < lens[sequence]; ++k) {
        if (spoiled(sequence, k)) continue;
        double* key = &own[static_cast<size_t>(k) * WIDTH];
        for (int c = 0; c < WIDTH; ++c) key[c] = draw(cache + (slot(sequence, k) * WIDTH + c) * KEY_SIZE, FP8_KEYS);
        if (UNROTATED) rotate(key + VALUES, k);
      }
    }
  }

  void fill_queries() {
    const size_t count = static_cast<size_t>(first_tokens.back()) * heads * WIDTH;
    q = before_a_fence<uint8_t>(count * Q_SIZE);
    q_size = has("large") ? 0x1p20f : has("small") ? 0x1p-40f : 1.0f;
    for (size_t i = 0; i < count; ++i) q_values.push_back(draw(q + i * Q_SIZE, FP8_Q, q_size));
  }
};

}  // namespace

int main(int argc, char** argv) { return run_program<Case, Kernel>(argc, argv); }
