// Sparse decode by the source of csrc/sm_90/sparse_decode/swap_ab on a CPU, compared with fp64 on keys rounded to bf16.
// KV_FORMAT and Q_ROWS are the instance's. Arguments: heads, tokens, splits (of every token), groups (SM parts that walk
// them), what, and for each pool its page size, pages and the most keys that a token selects.
//   what  plain; one (key each, queries of 0: results are the row itself); sharp (large scores); sink; absent (half of the
//         indices select nothing); ragged (indptr); lengths; planned (two SM parts of a plan for each group)
// Prints the largest relative error of a row of results and the largest of an lse; fails above their bounds.
#include <string>

#include "arguments.hpp"
#include "decode_case.hpp"
#include "sm_90/sparse_decode/swap_ab/kernel.hpp"

namespace {

using namespace mla;
using namespace mla::sm_90;
using Traits = SparseSwapAbTraits<KV_FORMAT, Q_ROWS>;
constexpr int WIDTH = 576, RECORD = 656;
constexpr double MAX_ERROR = 6e-3, MAX_LSE_ERROR = 1e-5;
constexpr int ABSURD[] = {-1, 0x7FFFFFFF, -0x7FFFFFFF - 1, -7};

struct HostPool {
  int page, pages, topk, page_bytes;
  uint8_t* cache;
  std::vector<int32_t> indices, indptr, lengths;

  uint8_t* record(int slot) const {
    return cache + static_cast<size_t>(slot / page) * page_bytes + static_cast<size_t>(slot % page) * RECORD;
  }
};

struct Case {
  int heads, tokens, splits, groups;
  std::string what;
  std::vector<HostPool> pools;
  std::mt19937 random{7};
  std::normal_distribution<float> normal;

  std::vector<uint16_t> q, out;
  std::vector<float> sink, lse, partial_out, partial_lse;
  std::vector<int32_t> plan;
  QueryMap map{};
  SparseDecodeTmaParams params{};

  // A record of finite values: any code below 8, scales from 2^-4 to 2 that are no powers of two.
  void fill_record(uint8_t* record) {
    for (int c = 0; c < VALUES; ++c) record[c] = random() % 0x50 | (random() & 1) << 7;
    for (int block = 0; block < 4; ++block) {
      float scale = std::exp2(std::uniform_real_distribution<float>(-4.0f, 1.0f)(random));
      if (what == "one") scale *= std::ldexp(1.0f, static_cast<int>(random() % 80) - 60);
      std::memcpy(record + VALUES + 4 * block, &scale, 4);
    }
    for (int c = 0; c < 64; ++c) {
      const uint16_t bits = float_to_bf16(normal(random));
      std::memcpy(record + 528 + 2 * c, &bits, 2);
    }
  }

  // Slots that nobody selects are NaN, and so is what lies between pages.
  void fill_pools() {
    for (HostPool& pool : pools) {
      const int slots = pool.page * pool.pages;
      pool.page_bytes = pool.page * RECORD + 48;
      const size_t bytes = static_cast<size_t>(max(pool.pages, 1)) * pool.page_bytes;
      pool.cache = static_cast<uint8_t*>(std::aligned_alloc(16, (bytes + 15) / 16 * 16));
      std::memset(pool.cache, 0xFF, bytes);
      if (what == "ragged") {
        pool.indptr.push_back(3);
        pool.indices.assign(3, -1);
      }
      for (int token = 0; token < tokens; ++token) {
        const int count = what == "ragged" ? static_cast<int>(random() % (pool.topk + 1)) : pool.topk;
        for (int i = 0; i < count; ++i) {
          const bool absent = slots == 0 || (what == "absent" && random() % 2 == 0) || (what != "one" && random() % 16 == 0);
          const int odd = static_cast<int>(random() % 5);
          const int slot = !absent ? static_cast<int>(random() % slots) : odd == 4 ? slots : ABSURD[odd];
          pool.indices.push_back(slot);
          if (!absent && pool.record(slot)[VALUES + 3] == 0xFF) fill_record(pool.record(slot));
        }
        if (what == "ragged") pool.indptr.push_back(static_cast<int>(pool.indices.size()));
        if (what == "lengths") pool.lengths.push_back(static_cast<int>(random() % (pool.topk + 9)) - 4);
      }
    }
  }

  void fill_queries() {
    q.resize(static_cast<size_t>(tokens) * heads * WIDTH);
    for (uint16_t& bits : q) bits = what == "one" ? 0 : float_to_bf16(normal(random));
    map = {q.data(), tokens * heads, WIDTH, (heads + 7) / 8 * 8, Traits::Q_BOXES};
    for (int head = 0; head < heads; ++head) sink.push_back(3 * normal(random));
  }

  std::vector<const uint8_t*> selected(int token) const {
    std::vector<const uint8_t*> records;
    for (const HostPool& pool : pools) {
      int first = token * pool.topk, count = pool.topk;
      if (!pool.indptr.empty()) {
        first = pool.indptr[token];
        count = pool.indptr[token + 1] - first;
      } else if (!pool.lengths.empty()) {
        count = max(0, min(count, pool.lengths[token]));
      }
      for (int i = first; i < first + count; ++i)
        if (pool.indices[i] >= 0 && pool.indices[i] < pool.page * pool.pages) records.push_back(pool.record(pool.indices[i]));
    }
    return records;
  }

  void fill_params() {
    const size_t rows = static_cast<size_t>(tokens) * heads;
    out.assign(rows * VALUES, 0x7FFF);
    lse.assign(rows, NAN);
    partial_out.assign(rows * splits * VALUES, NAN);
    partial_lse.assign(rows * splits, NAN);
    std::memcpy(params.q_map, &map, sizeof map);
    params.attn_sink = what == "sink" ? sink.data() : nullptr;
    if (what == "planned") {
      int keys = 0;
      for (const HostPool& pool : pools) keys += pool.topk;
      plan = plan_of(tokens, splits, groups, [=](int) { return keys; });
      params.plan = plan.data();
    }
    params.out = out.data();
    params.lse = lse.data();
    params.partial_out = splits > 1 ? partial_out.data() : nullptr;
    params.partial_lse = splits > 1 ? partial_lse.data() : nullptr;
    params.out_token_stride = heads * VALUES;
    params.out_head_stride = VALUES;
    params.lse_token_stride = 1;
    params.lse_head_stride = tokens;
    params.tokens = tokens;
    params.heads = heads;
    params.pools = static_cast<int>(pools.size());
    for (size_t i = 0; i < pools.size(); ++i) {
      const HostPool& from = pools[i];
      Pool& pool = params.pool[i];
      pool.cache = from.cache;
      pool.indices = from.indices.data();
      pool.indptr = from.indptr.empty() ? nullptr : from.indptr.data();
      pool.lengths = from.lengths.empty() ? nullptr : from.lengths.data();
      pool.page_bytes = from.page_bytes;
      pool.index_stride = from.topk;
      pool.slots = from.page * from.pages;
      pool.page = from.page;
      reciprocal(from.page, pool.page_reciprocal, pool.page_shift);
      pool.topk = from.indptr.empty() ? from.topk : static_cast<int>(from.indices.size());
      pool.tokens_per_length = 1;
    }
    params.num_splits = splits;
    params.grid_stride = groups;
    reciprocal(1, params.lse_tokens_reciprocal, params.lse_tokens_shift);
    params.empty_lse = -INFINITY;
    params.softmax_scale = what == "sharp" ? 0.3f : 0.02f;
  }

  // The definition's key: e4m3 times its scale, rounded to fp32 and then to bf16.
  static std::vector<double> key_of(const uint8_t* record) {
    std::vector<double> key(WIDTH);
    for (int c = 0; c < WIDTH; ++c) {
      uint16_t bits;
      if (c < VALUES) {
        float scale;
        std::memcpy(&scale, record + VALUES + c / 128 * 4, 4);
        bits = float_to_bf16(e4m3_to_float(record[c]) * scale);
      } else {
        std::memcpy(&bits, record + 528 + (c - VALUES) * 2, 2);
      }
      key[c] = bf16_to_float(bits);
    }
    return key;
  }

  ExactRow exact(const std::vector<std::vector<double>>& keys, size_t row) const {
    std::vector<double> scores;
    for (const auto& key : keys) {
      double score = 0.0;
      for (int c = 0; c < WIDTH; ++c) score += key[c] * bf16_to_float(q[row * WIDTH + c]);
      scores.push_back(score * params.softmax_scale);
    }
    return {scores, [&](size_t k, int c) { return keys[k][c]; }};
  }

  const float* sink_of(int head) const { return params.attn_sink ? &sink[head] : nullptr; }

  // A row's results and lse from the kernel, its partials combined.
  double kernel_row(int token, int head, std::vector<double>& values) {
    const size_t row = static_cast<size_t>(token) * heads + head;
    if (splits == 1) {
      for (int c = 0; c < VALUES; ++c) values[c] = bf16_to_float(out[row * VALUES + c]);
      return lse[static_cast<size_t>(head) * tokens + token];
    }
    const size_t first = static_cast<size_t>(token) * splits * heads + head;
    return combined(&partial_out[first * VALUES], &partial_lse[first], splits, heads, sink_of(head), -INFINITY, values);
  }

  bool compare() {
    Errors errors;
    for (int token = 0; token < tokens; ++token) {
      std::vector<std::vector<double>> keys;
      for (const uint8_t* record : selected(token)) keys.push_back(key_of(record));
      for (int head = 0; head < heads; ++head) {
        std::vector<double> values(VALUES, 0.0);
        const double found_lse = kernel_row(token, head, values);
        errors.add(exact(keys, static_cast<size_t>(token) * heads + head), sink_of(head), -INFINITY, values, found_lse);
      }
    }
    return errors.within(what == "one" ? 0.0 : MAX_ERROR, MAX_LSE_ERROR);
  }
};

const SparseDecodeTmaParams* launched;
void kernel() { SparseSwapAbKernel<Traits>::run(*launched); }

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  Case problem{number(1), number(2), number(3), number(4), argv[5], {}};
  for (int i = 6; i + 2 < argc; i += 3) problem.pools.push_back({number(i), number(i + 1), number(i + 2)});
  problem.fill_pools();
  problem.fill_queries();
  problem.fill_params();
  launched = &problem.params;
  const bool ended = run_blocks(number(1) + number(2), 1, problem.groups, kernel);
  return ended && problem.compare() ? 0 : 1;
}
