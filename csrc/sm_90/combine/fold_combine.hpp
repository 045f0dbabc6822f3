// combine in batch-invariant mode for a decode that may fold nodes of splits itself (decode/fold.hpp): the results of a
// node's splits are added as that decode adds them, then nodes are merged as combine merges splits. So a row has the
// same bits whether its nodes or their splits were the work tiles. Behind a planned decode that folds, a partial is the
// state of a fold (decode/node_state.hpp): a node's first may have several splits, and those behind it are then not there.
//
// A warp has a row, or some of its columns, to itself. Each lane loads a log-sum-exp of a node, so that all partials of it
// are read one round trip later, those of splits without keys not at all: these change neither sum.
#pragma once

#include "common/combine.hpp"
#include "sm_90/combine/sentinel.hpp"
#include "sm_90/split_fold.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm_90 {

template <class Shape>
struct FoldCombine : Combine<Wave, Shape> {
  using Base = Combine<Wave, Shape>;
  using typename Base::RowAssignment;
  using Base::chunks, Base::quad, Base::team, Base::vec;
  static constexpr int in_flight = Base::alone ? 8 : 2;  // partials read together
  static constexpr int min_waves = 4;                     // resident: they and two sums take registers

  static_assert(Base::parts == 1, "combine: one team adds all splits of a row");
  static_assert(team == Wave::lanes && 2 * NODE_SPLITS <= team, "combine: a lane for each word of a node's splits");

  MLA_DEVICE static void run(const CombineParams& p) {
    RowAssignment at;
    const uint32_t sequence = Base::team_of(p, static_cast<uint32_t>(block_id_x()), static_cast<uint32_t>(p.batch), at);
    Base::materialize_params(p);
    Wave::release_consumer();
    Wave::wait_for_producer();
    Base::resolve_splits(p, sequence, at);
    if (!at.wanted) return;
    const float own = own_word(p, at, 0);
    if (is_final(p, at, own)) return;
    const int nodes = (at.splits + NODE_SPLITS - 1) / NODE_SPLITS;
    if (nodes <= 1)
      take_node(p, at, own);
    else
      merge_nodes(p, at, own, nodes);
  }

 private:
  // This lane's columns of a node's result.
  struct Node {
    SplitFold fold;
    float sum[chunks][vec];

    // Adds the splits of the node that begins with `first_split`; `own` is this lane's word of it.
    MLA_DEVICE void load(const CombineParams& p, const RowAssignment& at, int first_split, float own) {
      for (int c = 0; c < chunks; ++c)
        for (int k = 0; k < vec; ++k) sum[c][k] = -0.0f;
      const int splits = min(NODE_SPLITS, at.splits - first_split);
      uint32_t left = __ballot_sync(~0u, at.lane < splits && own != -bit_cast<float>(INFINITY_BITS));
#pragma unroll 1
      while (left != 0) {
        int split[in_flight];  // negative behind the last
        Vec<float, quad> loaded[in_flight][chunks][vec / quad];
        for (int i = 0; i < in_flight; ++i) {
          split[i] = __ffs(left) - 1;
          left &= left - 1;
          if (split[i] >= 0) load_partial(p, at, first_split + split[i], loaded[i]);
        }
        for (int i = 0; i < in_flight; ++i) {
          if (split[i] < 0) break;
          float before, factor;
          fold.add(word_of(at, own, split[i]), before, factor);
          if (split[i] == 0 && are_states(p)) fold.sum = word_of(at, own, NODE_SPLITS);
          for (int c = 0; c < chunks; ++c)
            for (int k = 0; k < vec; ++k)
              sum[c][k] = SplitFold::added(sum[c][k], before, SplitFold::term(loaded[i][c][k / quad][k % quad], factor));
        }
      }
    }

    MLA_DEVICE void add_to(float (&result)[chunks][vec], float weight) const {
      const float own = fold.scale();
      for (int c = 0; c < chunks; ++c)
        for (int k = 0; k < vec; ++k) result[c][k] = __builtin_fmaf(weight, sum[c][k] * own, result[c][k]);
    }
  };

  // A row of one node, whose log-sum-exp is the row's.
  MLA_DEVICE static void take_node(const CombineParams& p, const RowAssignment& at, float own) {
    Node node;
    node.load(p, at, 0, own);
    const LseAccum row{float_to_ordered_int(node.fold.lse()), 1.0f};
    Base::write_lse(p, at, row);
    float scale;
    const auto outcome = Base::find_scale(p, row, scale, [&] { return *Base::sink_at(p, at); });
    float result[chunks][vec] = {};
    if (outcome == Base::SUM && scale != 0.0f) node.add_to(result, scale);
    Base::write_out(p, at, outcome, result);
  }

  // Several nodes; `word` is this lane's of the first.
  MLA_DEVICE static void merge_nodes(const CombineParams& p, const RowAssignment& at, float word, int nodes) {
    const float own = lse_of_node(p, at, at.member);
    int largest = float_to_ordered_int(own);
#pragma unroll 1
    for (int node = at.member + team; node < nodes; node += team)
      largest = Base::max_of(largest, float_to_ordered_int(lse_of_node(p, at, node)));
    LseAccum row{Wave::template max_over<team>(largest, at.lane), 0.0f};
    const float base = row.base();
    float sum = exp_of<Wave>(own - base);
#pragma unroll 1
    for (int node = at.member + team; node < nodes; node += team) sum += exp_of<Wave>(lse_of_node(p, at, node) - base);
    row.sum = Wave::template sum_over<team>(sum, at.lane);
    Base::write_lse(p, at, row);
    float scale;
    const auto outcome = Base::find_scale(p, row, scale, [&] { return *Base::sink_at(p, at); });
    float result[chunks][vec] = {};
    if (outcome == Base::SUM)
#pragma unroll 1
      for (int i = 0; i < nodes; ++i) {
        Node node;
        const float next = own_word(p, at, (i + 1) * NODE_SPLITS);  // arrives while partials are read
        node.load(p, at, i * NODE_SPLITS, word);
        word = next;
        const float weight = exp_of<Wave>(node.fold.lse() - base) * scale;
        if (weight != 0.0f) node.add_to(result, weight);
      }
    Base::write_out(p, at, outcome, result);
  }

  MLA_DEVICE static float lse_of_node(const CombineParams& p, const RowAssignment& at, int node) {
    float lse[NODE_SPLITS];
#pragma unroll
    for (int i = 0; i < NODE_SPLITS; ++i) lse[i] = lse_of_split(p, at, node * NODE_SPLITS + i);
    SplitFold fold;
    float before, factor;
#pragma unroll
    for (int i = 0; i < NODE_SPLITS; ++i) {
      fold.add(lse[i], before, factor);
      if (i == 0 && are_states(p) && node * NODE_SPLITS < at.splits) fold.sum = lse_at(p, at, node * NODE_SPLITS)[1];
    }
    return fold.lse();
  }

  // This lane's word of the node that begins with a split: of the first NODE_SPLITS lanes the log-sum-exp of a split
  // each, or, where partials are states, the base; of the next the sums of weights of states.
  MLA_DEVICE static float own_word(const CombineParams& p, const RowAssignment& at, int first_split) {
    const int split = first_split + at.lane % NODE_SPLITS;
    if (split >= at.splits) return -bit_cast<float>(INFINITY_BITS);
    return lse_at(p, at, split)[are_states(p) && at.lane / NODE_SPLITS == 1 ? 1 : 0];
  }
  MLA_DEVICE static float word_of(const RowAssignment& at, float own, int lane) {
    return Wave::template from_team<team>(own, at.lane, lane);
  }

  // Whether partials are states: then two words are in place of a log-sum-exp.
  MLA_DEVICE static bool are_states(const CombineParams& p) { return p.partial_lse_row_stride == 2; }

  // Whether decode has stored the row's result.
  MLA_DEVICE static bool is_final(const CombineParams& p, const RowAssignment& at, float own) {
    return are_states(p) && bit_cast<uint32_t>(word_of(at, own, 0)) == SENTINEL;
  }

  // Behind a row's last split the last one is read in place of others, so that no load waits for a branch; none of it
  // counts, since the log-sum-exp is then -inf.
  MLA_DEVICE static int64_t read_in_place_of(const RowAssignment& at, int split) {
    return at.first + (split < at.splits ? split : at.splits - 1);
  }
  MLA_DEVICE static float lse_of_split(const CombineParams& p, const RowAssignment& at, int split) {
    const float lse = *lse_at(p, at, split);
    return split < at.splits ? lse : -bit_cast<float>(INFINITY_BITS);
  }
  MLA_DEVICE static const float* lse_at(const CombineParams& p, const RowAssignment& at, int split) {
    return p.partial_lse + (read_in_place_of(at, split) * p.partial_lse_split_stride + at.row * p.partial_lse_row_stride);
  }

  // This lane's columns of a partial.
  MLA_DEVICE static void load_partial(const CombineParams& p, const RowAssignment& at, int split,
                                      Vec<float, quad> (&to)[chunks][vec / quad]) {
    const float* from = p.partial_out + (read_in_place_of(at, split) * p.partial_split_stride +
                                         at.row * p.partial_row_stride + at.first_column + at.member * vec);
    for (int c = 0; c < chunks; ++c)
      for (int q = 0; q < vec / quad; ++q) to[c][q] = *reinterpret_cast<const Vec<float, quad>*>(from + c * team * vec + q * quad);
  }
};

}  // namespace mla::sm_90
