// Sparse decode by the source of csrc/sm_90/sparse_decode/swap_ab on a CPU, compared with fp64 on keys rounded to bf16.
// KV_FORMAT and Q_ROWS are the instance's. Arguments: heads, tokens, splits (of every token), groups (SM parts that walk
// them), what, and for each pool its page size, pages and the most keys that a token selects.
//   what  plain; one (key each, queries of 0: results are the row itself); sharp (large scores); sink; absent (half of the
//         indices select nothing); ragged (indptr); lengths; planned (two SM parts of a plan for each group)
// Prints the largest relative error of a row of results and the largest of an lse; fails above their bounds.
#include <string>

#include "arguments.hpp"
#include "block.hpp"
#include "sm_90/decode/swap_ab/kernel.hpp"
#include "sm_90/sparse_decode/swap_ab/mainloop.hpp"
#include "sm_90/sparse_decode/swap_ab/producer.hpp"

namespace {

using namespace mla;
using namespace mla::sm_90;
using Traits = SparseSwapAbTraits<SparseDecodeProblem<KV_FORMAT>, SparseSwapAbPolicy<Q_ROWS>>;
using Kernel =
    SwapAbKernel<Traits, SparseTileScheduler, SparseSwapAbProducer, SparseSwapAbMainloop, SwapAbEpilogue>;
constexpr int WIDTH = 576, VALUES = 512, RECORD = 656;
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

  // Every token in `splits` tiles, shared out to twice as many SM parts as there are groups.
  void make_plan() {
    const int parts = groups * 2, tiles = tokens * splits, at = PlanHeader::work_tiles_at(tokens, parts);
    int keys = 0;
    for (const HostPool& pool : pools) keys += pool.topk;
    plan.assign(at + PlanHeader::work_tile_words * tiles, 0);
    plan[PlanHeader::num_sm_parts] = parts;
    plan[PlanHeader::work_tiles] = at;
    plan[PlanHeader::work_indptr] = PlanHeader::work_indptr_at(tokens);
    for (int part = 0; part <= parts; ++part) plan[PlanHeader::work_indptr_at(tokens) + part] = tiles * part / parts;
    for (int tile = 0; tile < tiles; ++tile) {
      const int number = tile % splits;
      int32_t* words = &plan[at + PlanHeader::work_tile_words * tile];
      words[0] = tile / splits;
      words[1] = keys * number / splits;
      words[2] = number + 1 == splits ? 0x7FFFFFFF : keys * (number + 1) / splits;
      words[3] = splits > 1 ? tile : -1;
    }
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
      make_plan();
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

  // A row's results by fp64, not divided by anything, with the sum and the largest score.
  struct Exact {
    std::vector<double> values = std::vector<double>(VALUES, 0.0);
    double sum = 0.0, top = -INFINITY;
  };
  Exact exact(const std::vector<std::vector<double>>& keys, size_t row) const {
    Exact result;
    std::vector<double> scores;
    for (const auto& key : keys) {
      double score = 0.0;
      for (int c = 0; c < WIDTH; ++c) score += key[c] * bf16_to_float(q[row * WIDTH + c]);
      scores.push_back(score * params.softmax_scale);
      result.top = max(result.top, scores.back());
    }
    for (size_t k = 0; k < keys.size(); ++k) {
      const double p = std::exp(scores[k] - result.top);
      result.sum += p;
      for (int c = 0; c < VALUES; ++c) result.values[c] += p * keys[k][c];
    }
    return result;
  }

  // A row's results and lse from the kernel, its partials combined.
  double kernel_row(int token, int head, std::vector<double>& values) {
    const size_t row = static_cast<size_t>(token) * heads + head;
    if (splits == 1) {
      for (int c = 0; c < VALUES; ++c) values[c] = bf16_to_float(out[row * VALUES + c]);
      return lse[static_cast<size_t>(head) * tokens + token];
    }
    double top = -INFINITY, sum = 0.0;
    const size_t first = static_cast<size_t>(token) * splits * heads + head;
    for (int split = 0; split < splits; ++split) {
      const float of_split = partial_lse[first + split * heads];
      if (std::isnan(of_split)) return NAN;
      top = max(top, static_cast<double>(of_split));
    }
    if (top == -INFINITY) return top;
    for (int split = 0; split < splits; ++split) {
      const double weight = std::exp(partial_lse[first + split * heads] - top);
      sum += weight;
      for (int c = 0; c < VALUES; ++c) values[c] += weight * partial_out[(first + split * heads) * VALUES + c];
    }
    const double denominator = sum + (params.attn_sink ? std::exp(sink[head] - top) : 0.0);
    for (double& value : values) value /= denominator;
    return top + std::log(sum);
  }

  bool compare() {
    double worst = 0.0, worst_lse = 0.0;
    const auto note = [](double& most, double error) {
      if (!std::isnan(most) && !(error <= most)) most = error;
    };
    for (int token = 0; token < tokens; ++token) {
      std::vector<std::vector<double>> keys;
      for (const uint8_t* record : selected(token)) keys.push_back(key_of(record));
      for (int head = 0; head < heads; ++head) {
        const Exact wanted = exact(keys, static_cast<size_t>(token) * heads + head);
        std::vector<double> values(VALUES, 0.0);
        const double found_lse = kernel_row(token, head, values);
        const double wanted_lse = wanted.sum != 0.0 ? wanted.top + std::log(wanted.sum) : -INFINITY;
        const double more = params.attn_sink && wanted.sum != 0.0 ? std::exp(sink[head] - wanted.top) : 0.0;
        double off = 0.0, size = 0.0;
        for (int c = 0; c < VALUES; ++c) {
          const double value = wanted.sum != 0.0 ? wanted.values[c] / (wanted.sum + more) : 0.0;
          off += (values[c] - value) * (values[c] - value);
          size += value * value;
        }
        note(worst, std::sqrt(size > 0.0 ? off / size : off));
        if (found_lse != wanted_lse) note(worst_lse, std::fabs(found_lse - wanted_lse) / max(1.0, std::fabs(wanted_lse)));
      }
    }
    std::printf("results off by %.1e, lse by %.1e\n", worst, worst_lse);
    return worst <= (what == "one" ? 0.0 : MAX_ERROR) && worst_lse <= MAX_LSE_ERROR;
  }
};

const SparseDecodeTmaParams* launched;
void kernel() { Kernel::run(*launched); }

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  Case problem{number(1), number(2), number(3), number(4), argv[5], {}};
  for (int i = 6; i + 2 < argc; i += 3) problem.pools.push_back({number(i), number(i + 1), number(i + 2)});
  problem.fill_pools();
  problem.fill_queries();
  problem.fill_params();
  launched = &problem.params;
  Block block(number(1) + number(2));
  for (unsigned group = 0; group < static_cast<unsigned>(problem.groups); ++group) {
    blockIdx = {0, group, 0};
    if (!block.run(kernel)) {
      std::printf("threads wait for what never comes\n");
      return 1;
    }
  }
  return problem.compare() ? 0 : 1;
}
