// Decode of an un-rotated cache by the source of csrc/sm_90/decode on a CPU, compared with fp64 (dense_case.hpp). DTYPE and
// KV_SOURCE are the instance's. rope_cos_sin ends with the longest sequence, and a read behind it ends the program. In keys
// that no sequence owns lies NaN.
#include "block.hpp"
#include "dense_case.hpp"
#include "sm_90/decode/kernel.hpp"
#include "sm_90/decode/producer_cp_async.hpp"
#include "sm_90/decode/producer_tma_rotated.hpp"

namespace {

using namespace mla;
using namespace mla::sm_90;
using Traits =
    DecodeTraits<DecodeProblem<DTYPE, WIDTH, true>, DecodePolicyOf<KvLoad::KV_SOURCE, ClusterNone, WIDTH, true>>;
template <class T, class Scheduler>
using Producer =
    std::conditional_t<T::LOAD == KvLoad::tma, ProducerTmaRotated<T, Scheduler>, ProducerCpAsync<T, Scheduler>>;
using Kernel = DecodeKernel<Traits, TileScheduler, Producer>;
constexpr int ROPE = 64, HALF = ROPE / 2;

uint16_t rounded(float value) { return DTYPE::is_bf16 ? float_to_bf16(value) : float_to_fp16(value); }
float value_of(uint16_t bits) { return DTYPE::is_bf16 ? bf16_to_float(bits) : fp16_to_float(bits); }

struct Case : DenseCase {
  uint16_t* cache = nullptr;
  uint16_t* q = nullptr;
  float* cos_sin = nullptr;

  void fill() {
    fill_cos_sin();
    fill_cache();
    fill_queries();
    fill_params(q, cache);
    params.rope_cos_sin = cos_sin;
    bf16_results = DTYPE::is_bf16;
    map_queries<Traits>(q);
    if constexpr (Traits::LOAD == KvLoad::tma) map_keys<Traits>(cache);
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

  void fill_cache() {
    const size_t slots = fill_table() * page;
    cache = aligned<uint16_t>(slots * WIDTH);
    for (size_t i = 0; i < slots * WIDTH; ++i) cache[i] = rounded(normal(random));
    for (int sequence = 0; sequence < batch; ++sequence) {
      std::vector<double>& own = keys.emplace_back();
      for (int k = 0; k < width * page; ++k) {
        uint16_t* key = cache + slot(sequence, k) * WIDTH;
        if (absent(sequence, k)) {
          std::memset(key, 0xFF, WIDTH * 2);  // NaN
          own.insert(own.end(), WIDTH, NAN);
          continue;
        }
        for (int c = 0; c < VALUES; ++c) own.push_back(value_of(key[c]));
        const float* angles = cos_sin + static_cast<size_t>(k) * ROPE;
        for (int c = 0; c < ROPE; ++c) {
          const double low = value_of(key[VALUES + c % HALF]), high = value_of(key[VALUES + HALF + c % HALF]);
          const double cos = angles[c % HALF], sin = angles[HALF + c % HALF];
          own.push_back(c < HALF ? low * cos - high * sin : high * cos + low * sin);
        }
      }
    }
  }

  void fill_queries() {
    const size_t count = static_cast<size_t>(batch) * rows * WIDTH;
    q = aligned<uint16_t>(count);
    for (size_t i = 0; i < count; ++i) {
      q[i] = rounded(normal(random));
      q_values.push_back(value_of(q[i]));
    }
  }
};

}  // namespace

int main(int argc, char** argv) { return run_program<Case, Kernel>(argc, argv); }
