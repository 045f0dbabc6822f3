// What every case of a decode kernel on a CPU has, dense or sparse: its plan, its blocks one after the other, a row's
// results by fp64 and from the kernel's partials, and the comparison of the two.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "block.hpp"
#include "common/plan_header.hpp"

#ifndef D_V
#define D_V 512
#endif
constexpr int VALUES = D_V;

// A plan of every sequence in `splits` tiles, shared out to `parts` SM parts. `length` gives a sequence's keys.
template <class Length>
std::vector<int32_t> plan_of(int batch, int splits, int parts, Length length) {
  using mla::PlanHeader;
  const int tiles = batch * splits, at = PlanHeader::work_tiles_at(batch, parts);
  std::vector<int32_t> plan(at + PlanHeader::work_tile_words * tiles, 0);
  plan[PlanHeader::num_sm_parts] = parts;
  plan[PlanHeader::work_tiles] = at;
  plan[PlanHeader::work_indptr] = PlanHeader::work_indptr_at(batch);
  for (int part = 0; part <= parts; ++part) plan[PlanHeader::work_indptr_at(batch) + part] = tiles * part / parts;
  for (int tile = 0; tile < tiles; ++tile) {
    const int sequence = tile / splits, number = tile % splits;
    const int keys = max(length(sequence), splits);  // no two tiles begin at the same key
    int32_t* words = &plan[at + PlanHeader::work_tile_words * tile];
    words[0] = sequence;
    words[1] = keys * number / splits;
    words[2] = number + 1 == splits ? 0x7FFFFFFF : keys * (number + 1) / splits;
    words[3] = splits > 1 ? tile : -1;
  }
  return plan;
}

// Runs `tiles` x `groups` blocks; false, after a line that says so, where threads wait for what never comes.
inline bool run_blocks(unsigned seed, int tiles, int groups, void (*kernel)()) {
  Block block(seed);
  gridDim = {static_cast<unsigned>((tiles + CLUSTER_X - 1) / CLUSTER_X * CLUSTER_X), static_cast<unsigned>(groups), 1};
  for (unsigned tile = 0; tile < gridDim.x; tile += CLUSTER_X)
    for (unsigned group = 0; group < gridDim.y; group += CLUSTER_Y) {
      blockIdx = {tile, group, 0};
      if (!block.run(kernel)) {
        std::printf("threads wait for what never comes\n");
        return false;
      }
    }
  return true;
}

// A row's results by fp64, not divided by anything, with the sum of the weights and the largest score. `value` gives a
// key's column.
struct ExactRow {
  std::vector<double> values = std::vector<double>(VALUES, 0.0);
  double sum = 0.0, top = -INFINITY;

  template <class Value>
  ExactRow(const std::vector<double>& scores, Value value) {
    for (double score : scores) top = max(top, score);
    for (size_t k = 0; k < scores.size(); ++k) {
      const double p = std::exp(scores[k] - top);
      sum += p;
      for (int c = 0; c < VALUES; ++c) values[c] += p * value(k, c);
    }
  }
};

// The lse of a row from its partials, which lie `stride` rows apart, and its results added to `values`, which are zeros.
// `sink` is null without one; `empty` marks the lse of a row without keys. NaN in any partial lse gives NaN.
inline double combined(const float* partial_out, const float* partial_lse, int splits, int stride, const float* sink,
                       double empty, std::vector<double>& values) {
  double top = -INFINITY, sum = 0.0;
  for (int split = 0; split < splits; ++split) {
    const float of_split = partial_lse[split * stride];
    if (std::isnan(of_split)) return NAN;
    top = max(top, static_cast<double>(of_split));
  }
  if (top == -INFINITY) return empty;
  for (int split = 0; split < splits; ++split) {
    const double weight = std::exp(partial_lse[split * stride] - top);
    sum += weight;
    const float* part = partial_out + static_cast<size_t>(split) * stride * VALUES;
    for (int c = 0; c < VALUES; ++c) values[c] += weight * part[c];
  }
  const double denominator = sum + (sink != nullptr ? std::exp(*sink - top) : 0.0);
  for (double& value : values) value /= denominator;
  return top + std::log(sum);
}

// The largest relative error of a row of results, and of an lse. NaN once is NaN for good.
struct Errors {
  double results = 0.0, lse = 0.0;

  static void note(double& most, double error) {
    if (!std::isnan(most) && !(error <= most)) most = error;
  }
  // The error of a number such as an lse, which may be infinite.
  static void note_near(double& most, double found, double wanted) {
    if (found != wanted) note(most, std::fabs(found - wanted) / max(1.0, std::fabs(wanted)));
  }

  void add(const ExactRow& wanted, const float* sink, double empty, const std::vector<double>& values,
           double found_lse) {
    if (std::isnan(wanted.sum)) {
      if (!std::isnan(found_lse) || !std::isnan(values[0])) results = INFINITY;
      return;
    }
    const bool sees = wanted.sum != 0.0;
    const double more = sink != nullptr && sees ? std::exp(*sink - wanted.top) : 0.0;
    double off = 0.0, size = 0.0;
    for (int c = 0; c < VALUES; ++c) {
      const double value = sees ? wanted.values[c] / (wanted.sum + more) : 0.0;
      off += (values[c] - value) * (values[c] - value);
      size += value * value;
    }
    note(results, std::sqrt(size > 0.0 ? off / size : off));
    note_near(lse, found_lse, sees ? wanted.top + std::log(wanted.sum) : empty);
  }

  // Prints both; false above their bounds.
  bool within(double most_results, double most_lse) const {
    std::printf("results off by %.1e, lse by %.1e\n", results, lse);
    return results <= most_results && lse <= most_lse;
  }
};
