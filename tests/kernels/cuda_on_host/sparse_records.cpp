// Sparse decode by the source of csrc/sm_90/sparse_decode on a CPU, compared with fp64 on keys rounded to bf16. KV_FORMAT is
// the instance's; with Q_ROWS it is one of swap_ab, with FEW_HEADS of few_heads. Arguments: heads, tokens, splits (of every token),
// groups (SM parts that walk them), what, and for each pool its page size, pages and the most keys that a token selects. Of
// V4.1's pools the page size says which: 16i has each token's scales behind it, 16f and 16fi 4-bit values. Bare rows of
// e4m3 take descales, which are null where what is plain; with
// MAX_LOGITS rows of bf16 give the largest score of each query row as well.
//   what  plain; one (key each, queries of 0: results are the row itself); sharp (large scores); sink; absent (half of the
//         indices select nothing); ragged (indptr); lengths; planned (two SM parts of a plan for each group);
//         parts (queries in two tensors)
// Prints the largest relative error of a row of results and the largest of an lse and of a largest score; fails above
// their bounds.
#include <string>

#include "arguments.hpp"
#include "decode_case.hpp"
#ifdef FEW_HEADS
#include "sm_90/decode/swap_ab/kernel.hpp"
#include "sm_90/sparse_decode/few_heads/mainloop.hpp"
#include "sm_90/sparse_decode/few_heads/prologue.hpp"
#include "sm_90/sparse_decode/producer_dequant.hpp"
#elif defined(Q_ROWS)
#include "sm_90/decode/swap_ab/kernel.hpp"
#include "sm_90/sparse_decode/swap_ab/mainloop.hpp"
#include "sm_90/sparse_decode/swap_ab/producer.hpp"
#else
#include "sm_90/decode/cluster/modes.hpp"
#include "sm_90/decode/kernel.hpp"
#include "sm_90/sparse_decode/producer_dequant.hpp"
#include "sm_90/sparse_decode/producer_gather.hpp"
#ifndef CLUSTER_MODE
#define CLUSTER_MODE none
#endif
#endif
#ifndef MAX_LOGITS
#define MAX_LOGITS 0
#endif

namespace {

using namespace mla;
using namespace mla::sm_90;
#ifdef FEW_HEADS
using Traits = FewHeadsTraits<SparseDecodeProblem<KV_FORMAT>, FewHeadsPolicy<KV_FORMAT>>;
using Kernel = SwapAbKernel<Traits, SparseTileScheduler, ProducerDequant, FewHeadsMainloop, SwapAbEpilogue>;
constexpr int BLOCK_ROWS = Traits::ROWS;
#elif defined(Q_ROWS)
using Traits = SparseSwapAbTraits<SparseDecodeProblem<KV_FORMAT>, SparseSwapAbPolicy<Q_ROWS>>;
using Kernel =
    SwapAbKernel<Traits, SparseTileScheduler, SparseSwapAbProducer, SparseSwapAbMainloop, SwapAbEpilogue>;
constexpr int BLOCK_ROWS = Q_ROWS;
#else
using Traits = SparseDecodeTraits<SparseDecodeProblem<KV_FORMAT, MAX_LOGITS != 0>,
                                  SparseDecodePolicy<KV_FORMAT, cluster_mode::CLUSTER_MODE>>;
template <class T, class Scheduler>
using Producer =
    std::conditional_t<T::KvFormat::NEEDS_DEQUANT, ProducerDequant<T, Scheduler>, ProducerGather<T, Scheduler>>;
using Kernel = DecodeKernel<Traits, SparseTileScheduler, Producer>;
constexpr int BLOCK_ROWS = BLOCK_M;
#endif
#if defined(FEW_HEADS) || defined(Q_ROWS)
constexpr int MERGED = 1;  // splits that a cluster merges
#else
constexpr int MERGED = Traits::Cluster::MERGES_SPLITS ? Traits::Cluster::SPLITS : 1;
#endif
constexpr int WIDTH = KV_FORMAT::HEAD_DIM_QK;
constexpr bool BARE = !KV_FORMAT::HAS_SCALES, AS_STORED = !KV_FORMAT::NEEDS_DEQUANT;
constexpr double MAX_ERROR = AS_STORED ? 5e-3 : 6e-3, MAX_LSE_ERROR = 1e-5;
constexpr float EMPTY_LSE = AS_STORED ? INFINITY : -INFINITY;
constexpr int ABSURD[] = {-1, 0x7FFFFFFF, -0x7FFFFFFF - 1, -7};

// Where a pool's tokens lie in a page: `row` bytes apart, the scales of each `scales` bytes apart, from byte page x
// scales_per_token + scales_at on. `shared` values have a scale; those behind the last scaled one are bf16.
struct RecordLayout {
  int row, scaled, shared, scales_at, scales, scales_per_token;
  bool fp4 = false, fp32_scales = false;

  static RecordLayout of(const std::string& kind) {
    if constexpr (BARE) return {WIDTH, WIDTH, WIDTH, 0, 0, 0};
    if constexpr (AS_STORED) return {WIDTH * 2, 0, 1, 0, 0, 0};
    if constexpr (std::is_same_v<KV_FORMAT, v32>) return {656, 512, 128, 512, 656, 0, false, true};
    if constexpr (std::is_same_v<KV_FORMAT, v32nope>) return {528, 512, 128, 512, 528, 0, false, true};
    if constexpr (std::is_same_v<KV_FORMAT, dsv4>) return {576, 448, 64, 0, 8, 576};
    const bool interleaved = kind.find('i') != kind.npos;
    if (kind.find('f') != kind.npos)
      return interleaved ? RecordLayout{288, 512, 16, 256, 288, 0, true} : RecordLayout{256, 512, 16, 0, 32, 256, true};
    return interleaved ? RecordLayout{528, 512, 32, 512, 528, 0} : RecordLayout{512, 512, 32, 0, 16, 512};
  }
  int token_bytes() const { return BARE || scales_per_token == 0 ? row : row + scales; }
};

struct HostPool {
  std::string kind;
  int pages, topk;
  int page = std::atoi(kind.c_str()), page_bytes = 0;
  RecordLayout layout = RecordLayout::of(kind);
  uint8_t* cache = nullptr;
  std::vector<int32_t> indices{}, indptr{}, lengths{};
  std::vector<bool> filled = std::vector<bool>(page * pages);

  uint8_t* values(int slot) const { return block(slot) + static_cast<size_t>(slot % page) * layout.row; }
  uint8_t* scales(int slot) const {
    return block(slot) + page * layout.scales_per_token + slot % page * layout.scales + layout.scales_at;
  }
  uint8_t* others(int slot) const {  // bf16
    return layout.row == 656 ? values(slot) + 528 : values(slot) + layout.scaled;
  }

  // The definition's key: a value times its scale, rounded to fp32 and then to bf16; of a bare row, as it is stored.
  std::vector<double> key(int slot) const {
    constexpr float E2M1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    std::vector<double> key(WIDTH);
    for (int c = 0; c < WIDTH; ++c) {
      uint16_t bits;
      if (BARE) {
        key[c] = e4m3_to_float(values(slot)[c]);
        continue;
      }
      if (c < layout.scaled) {
        const uint8_t* at = scales(slot) + c / layout.shared * (layout.fp32_scales ? 4 : 1);
        float scale = layout.fp4 ? e4m3_to_float(*at) : *at == 255 ? NAN : std::ldexp(1.0f, *at - 127);
        if (layout.fp32_scales) std::memcpy(&scale, at, 4);
        float value = 0.0f;
        if (layout.fp4) {
          const int code = values(slot)[c / 2] >> c % 2 * 4 & 15;
          value = code & 8 ? -E2M1[code & 7] : E2M1[code];
        } else {
          value = e4m3_to_float(values(slot)[c]);
        }
        bits = float_to_bf16(value * scale);
      } else {
        std::memcpy(&bits, others(slot) + (c - layout.scaled) * 2, 2);
      }
      key[c] = bf16_to_float(bits);
    }
    return key;
  }

 private:
  uint8_t* block(int slot) const { return cache + static_cast<size_t>(slot / page) * page_bytes; }
};

struct Case {
  int heads, tokens, splits, groups;
  std::string what;
  std::vector<HostPool> pools;
  int partials = splits / MERGED;
  std::mt19937 random{7};
  std::normal_distribution<float> normal;

  std::vector<uint16_t> q, latent, rotary, out;
  std::vector<float> sink, lse, partial_out, partial_lse, max_logits;
  std::vector<int32_t> plan;
  float q_descale = 1.0f, kv_descale = 1.0f;
  QueryMap map{};
  SparseDecodeTmaParams params{};

  // A record of finite values: any e4m3 code below 8, scales from 2^-4 to 2, or more with one key each.
  void fill_record(HostPool& pool, int slot) {
    const RecordLayout& layout = pool.layout;
    for (int c = 0; c < (layout.fp4 ? layout.scaled / 2 : layout.scaled); ++c)
      pool.values(slot)[c] = layout.fp4 ? random() : random() % 0x50 | (random() & 1) << 7;
    for (int i = 0; i < layout.scaled / layout.shared && !BARE; ++i) {
      uint8_t* at = pool.scales(slot) + i * (layout.fp32_scales ? 4 : 1);
      if (layout.fp32_scales) {
        float scale = std::exp2(std::uniform_real_distribution<float>(-4.0f, 1.0f)(random));
        if (what == "one") scale *= std::ldexp(1.0f, static_cast<int>(random() % 80) - 60);
        std::memcpy(at, &scale, 4);
      } else if (layout.fp4) {
        *at = what == "one" ? random() % 0x7F | (random() & 1) << 7 : 0x18 + random() % 0x28;
      } else {
        *at = what == "one" ? random() % 240 : 123 + random() % 5;
      }
    }
    for (int c = layout.scaled; c < WIDTH; ++c) {
      const uint16_t bits = float_to_bf16(normal(random));
      std::memcpy(pool.others(slot) + 2 * (c - layout.scaled), &bits, 2);
    }
  }

  // Slots that nobody selects are NaN, and so is what lies between pages.
  void fill_pools() {
    for (HostPool& pool : pools) {
      const int slots = pool.page * pool.pages;
      pool.page_bytes = pool.page * pool.layout.token_bytes() + 48;
      pool.page_bytes += -pool.page_bytes & 15;
      // Nothing can be read behind the last page's tokens.
      const size_t last = static_cast<size_t>(pool.page * pool.layout.token_bytes() + 15) / 16 * 16;
      const size_t bytes = static_cast<size_t>(max(pool.pages, 1) - 1) * pool.page_bytes + last;
      pool.cache = before_a_fence<uint8_t>(bytes);
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
          if (!absent && !pool.filled[slot]) fill_record(pool, slot);
          if (!absent) pool.filled[slot] = true;
        }
        if (what == "ragged") pool.indptr.push_back(static_cast<int>(pool.indices.size()));
        if (what == "lengths") pool.lengths.push_back(static_cast<int>(random() % (pool.topk + 9)) - 4);
      }
    }
  }

  void fill_queries() {
    q.resize(static_cast<size_t>(tokens) * heads * WIDTH);
    for (uint16_t& bits : q) bits = what == "one" ? 0 : float_to_bf16(normal(random));
    const int64_t rows = static_cast<int64_t>(tokens) * heads;
    const int64_t box_rows = min(BLOCK_ROWS, (heads + 7) / 8 * 8);
    map = {q.data(), rows, WIDTH, 1, 0, WIDTH, box_rows, 1, Traits::Q_BOXES};
    if (what == "parts") map_parts(box_rows);
    for (int head = 0; head < heads; ++head) sink.push_back(3 * normal(random));
  }

  // The latent part as [heads][tokens], and the rope part.
  void map_parts(int64_t box_rows) {
    const int64_t rope = WIDTH - VALUES;
    for (int head = 0; head < heads; ++head)
      for (int token = 0; token < tokens; ++token) {
        const auto row = q.begin() + (static_cast<int64_t>(token) * heads + head) * WIDTH;
        latent.insert(latent.end(), row, row + VALUES);
      }
    for (int64_t row = 0; row < static_cast<int64_t>(tokens) * heads; ++row)
      rotary.insert(rotary.end(), q.begin() + row * WIDTH + VALUES, q.begin() + (row + 1) * WIDTH);
    map = {latent.data(), heads, static_cast<int64_t>(tokens) * VALUES, tokens, VALUES, VALUES, box_rows, 1, 1};
    const QueryMap of_rope{rotary.data(), heads, rope, tokens, heads * rope, rope, box_rows, 1, 1};
    std::memcpy(params.q_rope_map, &of_rope, sizeof of_rope);
    params.in_parts = 1;
  }

  std::vector<std::vector<double>> selected(int token) const {
    std::vector<std::vector<double>> keys;
    for (const HostPool& pool : pools) {
      int first = token * pool.topk, count = pool.topk;
      if (!pool.indptr.empty()) {
        first = pool.indptr[token];
        count = pool.indptr[token + 1] - first;
      } else if (!pool.lengths.empty()) {
        count = max(0, min(count, pool.lengths[token]));
      }
      for (int i = first; i < first + count; ++i)
        if (pool.indices[i] >= 0 && pool.indices[i] < pool.page * pool.pages) keys.push_back(pool.key(pool.indices[i]));
    }
    return keys;
  }

  void fill_params() {
    const size_t rows = static_cast<size_t>(tokens) * heads;
    out.assign(rows * VALUES, 0x7FFF);
    lse.assign(rows, NAN);
    partial_out.assign(rows * partials * VALUES, NAN);
    partial_lse.assign(rows * partials, NAN);
    std::memcpy(params.q_map, &map, sizeof map);
    params.attn_sink = what == "sink" ? sink.data() : nullptr;
    if (what == "planned") {
      int keys = 0;
      for (const HostPool& pool : pools) keys += pool.topk;
      plan = plan_of(tokens, splits, 2 * groups, [=](int) { return keys; });
      params.plan = plan.data();
    }
    params.out = out.data();
    params.lse = lse.data();
    params.partial_out = partials > 1 ? partial_out.data() : nullptr;
    params.partial_lse = partials > 1 ? partial_lse.data() : nullptr;
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
      params.fp4 |= from.layout.fp4 << i;
      params.interleaved |= (from.layout.scales_per_token == 0) << i;
    }
    params.num_splits = splits;
    params.grid_stride = groups;
    reciprocal(1, params.lse_tokens_reciprocal, params.lse_tokens_shift);
    params.empty_lse = EMPTY_LSE;
    max_logits.assign(rows, -INFINITY);
    if (MAX_LOGITS) params.max_logits = max_logits.data();
    if (BARE && what != "plain") {
      q_descale = 3.0f;
      kv_descale = 0.25f;  // of results of one key, too, which then have no other bits
      params.q_descale = &q_descale;
      params.kv_descale = &kv_descale;
    }
    params.softmax_scale = what == "sharp" ? 0.3f : 0.02f;
  }

  ExactRow exact(const std::vector<std::vector<double>>& keys, size_t row) const {
    std::vector<double> scores;
    for (const auto& key : keys) {
      double score = 0.0;
      for (int c = 0; c < WIDTH; ++c) score += key[c] * bf16_to_float(q[row * WIDTH + c]);
      scores.push_back(score * params.softmax_scale * q_descale * kv_descale);
    }
    return {scores, [&](size_t k, int c) { return keys[k][c] * kv_descale; }};
  }

  const float* sink_of(int head) const { return params.attn_sink ? &sink[head] : nullptr; }

  // A row's results and lse from the kernel, its partials combined.
  double kernel_row(int token, int head, std::vector<double>& values) {
    const size_t row = static_cast<size_t>(token) * heads + head;
    if (partials == 1) {
      for (int c = 0; c < VALUES; ++c) values[c] = bf16_to_float(out[row * VALUES + c]);
      return lse[static_cast<size_t>(head) * tokens + token];
    }
    const size_t first = static_cast<size_t>(token) * partials * heads + head;
    return combined(&partial_out[first * VALUES], &partial_lse[first], partials, heads, sink_of(head), EMPTY_LSE, values);
  }

  bool compare() {
    Errors errors;
    double worst_max = 0.0;
    for (int token = 0; token < tokens; ++token) {
      const std::vector<std::vector<double>> keys = selected(token);
      for (int head = 0; head < heads; ++head) {
        std::vector<double> values(VALUES, 0.0);
        const double found_lse = kernel_row(token, head, values);
        const size_t row = static_cast<size_t>(token) * heads + head;
        const ExactRow wanted = exact(keys, row);
        errors.add(wanted, sink_of(head), EMPTY_LSE, values, found_lse);
        Errors::note_near(worst_max, max_logits[row], params.max_logits == nullptr ? -INFINITY : wanted.top);
      }
    }
    std::printf("largest scores off by %.1e, ", worst_max);
    return errors.within(what == "one" ? 0.0 : MAX_ERROR, MAX_LSE_ERROR) && worst_max <= MAX_LSE_ERROR;
  }
};

const SparseDecodeTmaParams* launched;
void kernel() {
#ifdef FEW_HEADS
  FewHeadsPrologue<Traits>::prefetch(*launched);
#endif
  Kernel::run(*launched);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  Case problem{number(1), number(2), number(3), number(4), argv[5], {}};
  for (int i = 6; i + 2 < argc; i += 3) problem.pools.push_back({argv[i], number(i + 1), number(i + 2)});
  problem.fill_pools();
  problem.fill_queries();
  problem.fill_params();
  launched = &problem.params;
  const bool ended = run_blocks(number(1) + number(2), (problem.heads + BLOCK_ROWS - 1) / BLOCK_ROWS, problem.groups, kernel);
  return ended && problem.compare() ? 0 : 1;
}
