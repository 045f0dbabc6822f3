// Sparse decode of bf16 rows by the source of csrc/sm_90/sparse_decode on a CPU, compared with fp64. KV_FORMAT is the
// instance's. Arguments: heads, tokens, keys of a token, splits (of every token), groups (of blocks that walk them), page, what.
//   what  plain; lengths (of tokens, from 0 on); sink; sharp (large scores); no_max (max_logits is null)
// Prints the largest relative error of a token's results, of an lse and of a largest score; fails above their bounds.
#include <string>

#include "arguments.hpp"
#include "decode_case.hpp"
#include "sm_90/ptx/wgmma_ss.hpp"

#include "sm_90/decode/kernel.hpp"
#include "sm_90/sparse_decode/producer_gather.hpp"

namespace {

using namespace mla;
using namespace mla::sm_90;
using Traits = SparseDecodeTraits<SparseDecodeProblem<KV_FORMAT>, SparseDecodePolicy<KV_FORMAT, ClusterNone>>;
using Kernel = DecodeKernel<Traits, SparseTileScheduler, ProducerGather>;
constexpr int WIDTH = KV_FORMAT::HEAD_DIM_QK, PAGES = 40;
constexpr double MAX_ERROR = 5e-3, MAX_LSE_ERROR = 1e-5;

struct Case {
  int heads, tokens, topk, splits, groups, page;
  std::string what;
  std::mt19937 random{11};
  std::normal_distribution<float> normal;

  int slots = PAGES * page;
  uint16_t* cache = aligned<uint16_t>(static_cast<size_t>(slots) * WIDTH);
  uint16_t* q = aligned<uint16_t>(static_cast<size_t>(tokens) * heads * WIDTH);
  std::vector<int32_t> indices, lengths;
  std::vector<float> sink, lse, partial_out, partial_lse, max_logits;
  uint16_t* out = aligned<uint16_t>(static_cast<size_t>(tokens) * heads * VALUES);
  QueryMap map{};
  SparseDecodeTmaParams params{};

  void fill() {
    for (size_t i = 0; i < static_cast<size_t>(slots) * WIDTH; ++i) cache[i] = float_to_bf16(normal(random));
    for (size_t i = 0; i < static_cast<size_t>(tokens) * heads * WIDTH; ++i) q[i] = float_to_bf16(normal(random));
    for (int i = 0; i < tokens * topk; ++i) {
      const int kind = random() % 8;
      indices.push_back(kind == 0 ? -1 : kind == 1 ? slots + static_cast<int>(random() % 9) : random() % slots);
    }
    for (int i = 0; i < topk; ++i) indices[i] = -1;  // the first token selects nothing
    for (int token = 0; token < tokens; ++token) lengths.push_back(random() % 3 == 0 ? 0 : random() % (topk + 1));
    for (int head = 0; head < heads; ++head) sink.push_back(3 * normal(random));
    lse.assign(tokens * heads, NAN);
    partial_out.assign(static_cast<size_t>(tokens) * splits * heads * VALUES, NAN);
    partial_lse.assign(static_cast<size_t>(tokens) * splits * heads, NAN);
    max_logits.assign(tokens * heads, -INFINITY);
    const int box_rows = min(BLOCK_M, (heads + 7) / 8 * 8);
    map = {q, static_cast<int64_t>(tokens) * heads, WIDTH, box_rows, Traits::Q_BOXES};
    std::memcpy(params.q_map, &map, sizeof map);
    params.attn_sink = what == "sink" ? sink.data() : nullptr;
    params.out = out;
    params.lse = lse.data();
    params.partial_out = splits > 1 ? partial_out.data() : nullptr;
    params.partial_lse = splits > 1 ? partial_lse.data() : nullptr;
    params.out_token_stride = heads * VALUES;
    params.out_head_stride = VALUES;
    params.lse_token_stride = heads;
    params.lse_head_stride = 1;
    Pool& pool = params.pool[0];
    pool.cache = reinterpret_cast<const uint8_t*>(cache);
    pool.indices = indices.data();
    pool.lengths = what == "lengths" ? lengths.data() : nullptr;
    pool.page_bytes = static_cast<int64_t>(page) * WIDTH * 2;
    pool.index_stride = pool.topk = topk;
    pool.slots = slots;
    pool.page = page;
    reciprocal(page, pool.page_reciprocal, pool.page_shift);
    pool.tokens_per_length = 1;
    params.tokens = tokens;
    params.heads = heads;
    params.pools = 1;
    params.num_splits = splits;
    params.grid_stride = groups;
    reciprocal(1, params.lse_tokens_reciprocal, params.lse_tokens_shift);
    params.empty_lse = INFINITY;
    params.softmax_scale = what == "sharp" ? 0.7f : 0.04f;
    params.max_logits = what == "no_max" ? nullptr : max_logits.data();
  }

  // The results of a row by fp64.
  ExactRow exact(int token, int head) {
    std::vector<double> scores;
    std::vector<const uint16_t*> keys;
    const int count = what == "lengths" ? lengths[token] : topk;
    for (int i = 0; i < count; ++i) {
      const int slot = indices[token * topk + i];
      if (slot < 0 || slot >= slots) continue;
      keys.push_back(cache + static_cast<size_t>(slot) * WIDTH);
      double score = 0.0;
      for (int c = 0; c < WIDTH; ++c)
        score += static_cast<double>(bf16_to_float(q[(static_cast<size_t>(token) * heads + head) * WIDTH + c])) *
                 bf16_to_float(keys.back()[c]);
      scores.push_back(score * params.softmax_scale);
    }
    return {scores, [&](size_t k, int c) { return bf16_to_float(keys[k][c]); }};
  }

  const float* sink_of(int head) const { return params.attn_sink ? &sink[head] : nullptr; }

  // The same by the kernel, partials combined.
  double kernel_row(int token, int head, std::vector<double>& values) {
    const size_t row = static_cast<size_t>(token) * heads + head;
    if (splits == 1) {
      for (int c = 0; c < VALUES; ++c) values[c] = bf16_to_float(out[row * VALUES + c]);
      return lse[row];
    }
    const size_t first = static_cast<size_t>(token) * splits * heads + head;
    return combined(&partial_out[first * VALUES], &partial_lse[first], splits, heads, sink_of(head), INFINITY, values);
  }

  bool compare() {
    Errors errors;
    double worst_max = 0.0;
    for (int token = 0; token < tokens; ++token)
      for (int head = 0; head < heads; ++head) {
        const ExactRow wanted = exact(token, head);
        std::vector<double> values(VALUES, 0.0);
        const double found_lse = kernel_row(token, head, values);
        errors.add(wanted, sink_of(head), INFINITY, values, found_lse);
        const double raised = max_logits[static_cast<size_t>(token) * heads + head];
        Errors::note_near(worst_max, raised, params.max_logits == nullptr ? -INFINITY : wanted.top);
      }
    std::printf("largest scores off by %.1e, ", worst_max);
    return errors.within(MAX_ERROR, MAX_LSE_ERROR) && worst_max <= MAX_LSE_ERROR;
  }
};

const SparseDecodeTmaParams* launched;
void kernel() { Kernel::run(*launched); }

}  // namespace

int main(int, char** argv) {
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  Case problem{number(1), number(2), number(3), number(4), number(5), number(6), argv[7]};
  problem.fill();
  launched = &problem.params;
  const bool ended = run_blocks(number(1) + number(3), (problem.heads + 63) / 64, problem.groups, kernel);
  return ended && problem.compare() ? 0 : 1;
}
