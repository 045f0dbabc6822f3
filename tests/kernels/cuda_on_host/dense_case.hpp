// A problem of dense decode for programs that run a kernel on a CPU, in all that does not depend on how keys are stored:
// pages, a plan, the launch parameters, the results by fp64, and how the kernel's are compared with them.
//   what  plain; or some of these, joined by +: all_keys (not causal); sharp (large scores); sink; ragged (of query
//         tokens); planned (two SM parts of a plan for each group), paired with it (one, and what clusters add is
//         marked); descaled (by a q_descale times which fp16 queries are infinite), descaled_nan (by NaN, which all
//         results are); windowN (keys left of each query token; before the window lie NaN and page numbers of nothing);
//         tree (of drafts); foldN (keys of the splits that a CTA folds); parts (queries in two tensors); spoiledN (the
//         last N keys hold NaN, and a window's first N, and only row tiles that see none of them are compared). A
//         program may know others.
#pragma once

#include <string>

#include "arguments.hpp"
#include "common/params/decode_tma.hpp"
#include "common/visibility.hpp"
#include "decode_case.hpp"
#include "sm_90/combine/sentinel.hpp"
#include "sm_90/decode/traits.hpp"

#ifndef D_QK
#define D_QK 576
#endif
constexpr int WIDTH = D_QK;
constexpr double MAX_ERROR = 5e-3, MAX_LSE_ERROR = 1e-5;

struct DenseCase {
  int heads, q_len, page, splits, groups;  // splits of every sequence; groups of SM parts that walk them
  std::string what;
  std::vector<int> lens;
  std::mt19937 random{7};
  std::normal_distribution<float> normal;

  int rows = heads * q_len, batch = static_cast<int>(lens.size()), width = 1;
  int partials = splits;  // of every sequence
  int list_rows = 64;     // that walk one list of work tiles
  std::vector<int> table, counts, first_tokens{0};
  std::vector<std::vector<double>> keys;  // of a sequence, [length][WIDTH], as the definition has them
  std::vector<float> q_values, sink;
  bool bf16_results = true;
  double score_scale = 1.0, value_scale = 1.0;  // of the keys
  float q_descale = 1.3f;
  std::vector<uint16_t> out;
  std::vector<float> lse, partial_out, partial_lse;
  std::vector<int32_t> plan;
  std::vector<int64_t> tree;
  int window = -1;
  mla::DecodeTmaParams params{};

  bool has(const std::string& name) const { return ("+" + what).find("+" + name) != std::string::npos; }

  // Pages in any order; the number of all of them.
  size_t fill_table() {
    fill_counts();
    if (has("window")) window = number_of("window");
    for (int length : lens) width = max(width, (length + page - 1) / page);
    table.resize(batch * width);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int>(i);
    std::shuffle(table.begin(), table.end(), random);
    return table.size();
  }
  // The number of a key among all of the cache.
  size_t slot(int sequence, int k) const {
    return static_cast<size_t>(table[sequence * width + k / page]) * page + k % page;
  }

  // No key before this is read.
  int first_read(int sequence) const {
    return window < 0 ? 0 : max(0, lens[sequence] - counts[sequence] - window);
  }
  // The number behind a word of `what`; 0 without it.
  int number_of(const std::string& name) const {
    return has(name) ? std::atoi(what.c_str() + what.find(name) + name.size()) : 0;
  }

  bool spoiled(int sequence, int k) const {
    const int count = number_of("spoiled");
    return k >= lens[sequence] - count || (window >= 0 && k < first_read(sequence) + count);
  }
  // Whether some row that walks the row's list sees a spoiled key.
  bool beside_spoiled(int sequence, int row) const {
    const int first = row / list_rows * list_rows, last = min(first + list_rows, counts[sequence] * heads) - 1;
    const int earlier = lens[sequence] - counts[sequence];
    return number_of("spoiled") != 0 && (spoiled(sequence, earlier + last / heads) ||
                                         (window >= 0 && spoiled(sequence, max(0, earlier + first / heads - window))));
  }

  bool absent(int sequence, int k) const { return k < first_read(sequence) || k >= lens[sequence]; }

  void fill_counts() {
    for (int length : lens) {
      counts.push_back(has("ragged") ? min(length, static_cast<int>(random() % (q_len + 1))) : q_len);
      first_tokens.push_back(first_tokens.back() + counts.back());
    }
  }

  void fill_params(const void* q, const void* cache) {
    out.assign(static_cast<size_t>(batch) * rows * VALUES, 0x7FFF);
    lse.assign(batch * rows, NAN);
    const size_t folded_rows = has("fold") ? static_cast<size_t>(groups) * ((rows + 63) / 64) * 64 : 0;
    partial_out.assign((static_cast<size_t>(batch) * splits * rows + folded_rows) * VALUES, NAN);
    partial_lse.assign(static_cast<size_t>(batch) * splits * rows * (leaves_states() ? 2 : 1), NAN);
    for (int head = 0; head < heads; ++head) sink.push_back(3 * normal(random));
    params.q = q;
    params.kv_cache = cache;
    params.seq_lens = lens.data();
    params.page_ids = table.data();
    params.cu_seqlens_q = has("ragged") ? first_tokens.data() : nullptr;
    params.attn_sink = has("sink") ? sink.data() : nullptr;
    params.window_left = window;
    for (int sequence = 0; sequence < batch; ++sequence)
      for (int entry = 0; entry < first_read(sequence) / page; ++entry) table[sequence * width + entry] = 0x3FFFFFFF;
    if (has("tree")) {
      // A draft hangs on an earlier one, or on the cached keys.
      for (int sequence = 0; sequence < batch; ++sequence)
        for (int i = 0; i < counts[sequence]; ++i) {
          const int parent = static_cast<int>(random() % (i + 1)) - 1;
          tree.push_back((parent < 0 ? 0 : tree[first_tokens[sequence] + parent]) | int64_t{1} << i);
        }
      params.tree_mask = tree.data();
    }
    if (has("planned")) {
      plan = plan_of(batch, splits, has("paired") ? groups : 2 * groups, [&](int sequence) {
        return lens[sequence] - mla::window_origin(first_read(sequence));
      });
      params.plan = plan.data();
      params.plan_words = static_cast<int>(plan.size());
    }
    params.out = out.data();
    params.lse = lse.data();
    params.partial_out = splits > 1 || has("fold") ? partial_out.data() : nullptr;
    params.partial_lse = splits > 1 ? partial_lse.data() : nullptr;
    params.q_row_stride = WIDTH;
    params.kv_page_stride = page * WIDTH;
    params.page_ids_stride = params.page_ids_width = width;
    params.out_token_stride = heads * VALUES;
    params.out_head_stride = VALUES;
    params.lse_token_stride = heads;
    params.lse_head_stride = 1;
    params.batch = batch;
    params.heads = heads;
    params.heads_reciprocal = heads > 1 ? 0xFFFFFFFFu / heads + 1 : 0;
    params.q_len = q_len;
    params.rows = rows;
    params.page = page;
    reciprocal(page, params.page_reciprocal, params.page_shift);
    params.num_splits = splits;
    reciprocal(splits, params.splits_reciprocal, params.splits_shift);
    params.grid_stride = groups;
    params.causal = !has("all_keys");
    reciprocal(1, params.lse_tokens_reciprocal, params.lse_tokens_shift);
    params.empty_lse = -INFINITY;
    params.softmax_scale = has("sharp") ? 0.5f : 0.02f;
    if (has("fold")) {
      params.fold_size = number_of("fold");
      params.fold_slot = batch * splits;
      if (leaves_states()) split_by_size();
    }
    if (has("descaled")) {
      q_descale = 3e5f;
      params.softmax_scale /= q_descale;
      if (has("descaled_nan")) q_descale = NAN;
      params.q_descale = &q_descale;
    }
  }

  // Blocks in pairs leave one partial for two splits.
  void merge_in_pairs() {
    partials = splits / 2;
    if (partials == 1) params.partial_out = params.partial_lse = nullptr;
  }

  // Whether partials are states of folds (sm_90/decode/node_state.hpp).
  bool leaves_states() const { return has("fold") && has("planned"); }

  // Makes the plan's splits those of fold_size, but for each sequence's last, which is open.
  void split_by_size() {
    using mla::PlanHeader;
    params.split_size = params.fold_size;
    for (int sequence = 0; sequence <= batch; ++sequence) plan[PlanHeader::words + sequence] = sequence * splits;
    for (int tile = 0; tile < batch * splits; ++tile) {
      int32_t* words = &plan[plan[PlanHeader::work_tiles] + PlanHeader::work_tile_words * tile];
      words[1] = tile % splits * params.split_size;
      if (words[2] != PlanHeader::open_end) words[2] = words[1] + params.split_size;
    }
  }

  // The maps by which boxes bring queries and keys of 16 bits.
  template <class Traits>
  void map_queries(const uint16_t* q) {
    using namespace mla::sm_90;
    const int64_t box_rows = min(BLOCK_M, (rows + 7) / 8 * 8), tokens = first_tokens.back();
    if (!has("parts")) {
      const QueryMap map{q, tokens * heads, WIDTH, 1, 0, WIDTH, box_rows, 1, Traits::Q_BOXES};
      std::memcpy(params.q_map, &map, sizeof map);
      return;
    }
    // Parts as servers have them: the latent one [heads][tokens], the other within rows that are twice as long.
    const int64_t rope = WIDTH - VALUES, box_heads = q_len == 1 ? box_rows : min(heads, BLOCK_M);
    uint16_t* parts[] = {before_a_fence<uint16_t>(tokens * heads * VALUES), before_a_fence<uint16_t>(tokens * heads * rope * 2)};
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t head = 0; head < heads; ++head) {
        const uint16_t* row = q + (token * heads + head) * WIDTH;
        std::copy(row, row + VALUES, parts[0] + (head * tokens + token) * VALUES);
        std::copy(row + VALUES, row + WIDTH, parts[1] + ((token * heads + head) * 2 + 1) * rope);
      }
    const QueryMap latent{parts[0], heads, tokens * VALUES, tokens, VALUES, VALUES, box_heads, box_rows / box_heads, 1};
    const QueryMap rotary{parts[1] + rope, heads, 2 * rope, tokens, heads * 2 * rope, rope, box_heads, box_rows / box_heads, 1};
    std::memcpy(params.q_map, &latent, sizeof latent);
    std::memcpy(params.q_rope_map, &rotary, sizeof rotary);
    params.in_parts = 1;
  }
  template <class Traits>
  void map_keys(void* cache) {
    using namespace mla::sm_90;
    const bool stored = Traits::SCORES_AS_STORED;
    KeyMap map{static_cast<uint8_t*>(cache), stored ? 1 : 2, page, WIDTH, static_cast<int64_t>(page) * WIDTH, BLOCK_N,
               stored ? WIDTH / 64 : Traits::BOX_BLOCKS};
    std::memcpy(params.kv_map, &map, sizeof map);
    map.boxes = Traits::COLUMN_BLOCKS - Traits::BOX_BLOCKS;
    if (Traits::Cluster::SHARES_KV) std::memcpy(params.kv_rest_map, &map, sizeof map);
  }

  ExactRow exact(int sequence, int row, size_t query) const {
    const int token = row / heads, earlier = lens[sequence] - counts[sequence], own = earlier + token;
    const double scale = params.softmax_scale * score_scale * (params.q_descale ? *params.q_descale : 1.0f);
    std::vector<double> scores;
    std::vector<size_t> seen;
    for (int k = 0; k < lens[sequence]; ++k) {
      if (window >= 0 && k < own - window) continue;
      if (tree.empty() ? params.causal && k > own
                       : k >= earlier && (tree[first_tokens[sequence] + token] >> (k - earlier) & 1) == 0)
        continue;
      const double* key = &keys[sequence][static_cast<size_t>(k) * WIDTH];
      double& score = scores.emplace_back(0.0);
      for (int c = 0; c < WIDTH; ++c) score += q_values[query * WIDTH + c] * key[c] * scale;
      seen.push_back(k);
    }
    return {scores, [&](size_t k, int c) { return keys[sequence][seen[k] * WIDTH + c] * value_scale; }};
  }

  const float* sink_of(int row) const { return params.attn_sink ? &sink[row % heads] : nullptr; }

  // A row's results and lse from the kernel, its partials combined.
  double kernel_row(int sequence, int row, size_t query, std::vector<double>& values) const {
    if (partials == 1 || is_final(sequence, row)) {
      for (int c = 0; c < VALUES; ++c) {
        const uint16_t bits = out[query * VALUES + c];
        values[c] = bf16_results ? bf16_to_float(bits) : fp16_to_float(bits);
      }
      return lse[query];
    }
    const size_t first = static_cast<size_t>(sequence) * partials * rows + row;
    if (leaves_states()) return combined_states(first, sink_of(row), values);
    if (has("paired")) return combined_pairs(first, sink_of(row), values);
    return combined(&partial_out[first * VALUES], &partial_lse[first], partials, rows, sink_of(row), -INFINITY, values);
  }

  bool is_final(int sequence, int row) const {
    const size_t first = static_cast<size_t>(sequence) * splits * rows + row;
    if (!leaves_states() && !has("paired")) return false;
    return mla::bit_cast<uint32_t>(partial_lse[leaves_states() ? first * 2 : first]) == mla::sm_90::SENTINEL;
  }

  // A row's partials combined, of which those that a cluster has added to others are nothing.
  double combined_pairs(size_t first, const float* sink, std::vector<double>& values) const {
    std::vector<float> results, sums;
    for (int split = 0; split < splits; ++split) {
      const size_t at = first + static_cast<size_t>(split) * rows;
      sums.push_back(partial_lse[at]);
      for (int c = 0; c < VALUES; ++c)
        results.push_back(partial_lse[at] == -INFINITY ? 0.0f : partial_out[at * VALUES + c]);
    }
    return combined(results.data(), sums.data(), splits, 1, sink, -INFINITY, values);
  }

  // A row's states as the results and log-sum-exps that they stand for, combined. What is part of another has -inf.
  double combined_states(size_t first, const float* sink, std::vector<double>& values) const {
    std::vector<float> results, sums;
    for (int split = 0; split < splits; ++split) {
      const size_t at = first + static_cast<size_t>(split) * rows;
      const float base = partial_lse[at * 2], sum = base == -INFINITY ? 1.0f : partial_lse[at * 2 + 1];
      sums.push_back(base + std::log(sum));
      for (int c = 0; c < VALUES; ++c) results.push_back(base == -INFINITY ? 0.0f : partial_out[at * VALUES + c] / sum);
    }
    return combined(results.data(), sums.data(), splits, 1, sink, -INFINITY, values);
  }

  // Prints the largest relative error of a row of results and the largest of an lse; false above their bounds, and where
  // every row is beside a spoiled key.
  bool compare() const {
    Errors errors;
    bool compared = number_of("spoiled") == 0;
    for (int sequence = 0; sequence < batch; ++sequence)
      for (int row = 0; row < counts[sequence] * heads; ++row) {
        if (beside_spoiled(sequence, row)) continue;
        compared = true;
        const size_t query = static_cast<size_t>(first_tokens[sequence]) * heads + row;
        std::vector<double> values(VALUES, 0.0);
        const double found_lse = kernel_row(sequence, row, query, values);
        errors.add(exact(sequence, row, query), sink_of(row), -INFINITY, values, found_lse);
      }
    return errors.within(MAX_ERROR, MAX_LSE_ERROR) && compared;
  }

  // Runs the kernel's blocks one after the other; the program's exit status.
  int run(void (*kernel)()) { return run_blocks(heads, (rows + 63) / 64, groups, kernel) && compare() ? 0 : 1; }
};

// Runs a kernel on the problem that the program's arguments name: heads, q_len, page, splits (of every sequence), groups (SM
// parts that walk them), what, and lengths. Prints the largest relative error of a row of results and the largest of an lse;
// the exit status is 1 above their bounds.
template <class Case, class Kernel>
int run_program(int, char** argv) {
  std::vector<int> numbers, lens;
  for (int i = 1; i < 6; ++i) numbers.push_back(std::atoi(argv[i]));
  for (char** length = argv + 7; *length != nullptr; ++length) lens.push_back(std::atoi(*length));
  Case problem{{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], argv[6], lens}};
  problem.fill();
  static const mla::DecodeTmaParams* launched;
  launched = &problem.params;
  return problem.run([] { Kernel::run(*launched); });
}
