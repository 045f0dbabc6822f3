// combine: merges the partial results of each row's splits by their log-sum-exp. One pipeline for every arch.
//
// A team of lanes holds the columns of one row; the row's splits are dealt to `parts` teams, whose sums are added in
// shared memory. Lane i of a part owns the log-sum-exp of the part's i-th split: it computes that split's weight and
// broadcasts it to the team when the split is accumulated. A split of weight zero contributes nothing, whatever it
// holds. So does one whose log-sum-exp is +inf, FlashMLA's mark of a row without keys, if its partial is all zeros:
// where that may be, the template argument `marked` is true. Partials of our own kernels have no such mark.
//
// On an arch that reads early, lane i owns that of the row's i-th split instead, in every part: each part computes all
// weights by itself, so that the parts need not synchronise for them.
//
// Builds may use -fno-honor-nans, under which a float comparison must not meet a NaN: whether a row is NaN is decided
// on the bits of its log-sum-exps, and what is summed stays hidden from the optimiser until it is rounded.
#pragma once

#include "common/combine_rows.hpp"
#include "common/logarithm.hpp"
#include "common/lse_merge.hpp"
#include "common/lse_rows.hpp"
#include "common/narrow.hpp"

namespace mla {

template <class Wave, class Shape>
struct Combine : CombineRows<Wave, Shape> {
  using Rows = CombineRows<Wave, Shape>;
  using typename Rows::Outcome;
  using Rows::lse_of_row, Rows::outcome_of, Rows::scale_of, Rows::SUM, Rows::ZERO, Rows::NOT_A_NUMBER;
  using typename Rows::RowAssignment;
  using Rows::columns, Rows::vec, Rows::quad, Rows::team, Rows::chunks, Rows::parts, Rows::early, Rows::alone;
  using Rows::in_flight, Rows::owned, Rows::resolve_splits, Rows::team_of, Rows::sink_at;

  template <bool marked = false>
  MLA_DEVICE static float lse_of(const CombineParams& p, const RowAssignment& at, int split) {
    if (split >= at.splits) return -bit_cast<float>(INFINITY_BITS);
    const float lse = *lse_at(p, at, split);
    if constexpr (marked) return without_mark(p, at, split, lse);
    return lse;
  }
  // Returns the log-sum-exp `lse` of a split; -inf for +inf beside a partial of zeros.
  MLA_DEVICE static float without_mark(const CombineParams& p, const RowAssignment& at, int split, float lse) {
    if (bit_cast<int>(lse) != INFINITY_BITS) return lse;
    const float* row = p.partial_out + ((at.first + split) * p.partial_split_stride + at.row * p.partial_row_stride);
#pragma unroll 1
    for (int column = 0; column < Shape::head_dim_v; ++column)
      if ((bit_cast<int>(row[column]) & 0x7fffffff) != 0) return lse;
    return -bit_cast<float>(INFINITY_BITS);
  }
  MLA_DEVICE static const float* lse_at(const CombineParams& p, const RowAssignment& at, int split) {
    if constexpr (early) return at.lse + (split - at.member) * p.partial_lse_split_stride;
    return p.partial_lse + ((at.first + split) * p.partial_lse_split_stride + at.row * p.partial_lse_row_stride);
  }

  // The split whose log-sum-exp is the lane's `i`-th.
  MLA_DEVICE static int own_split(const RowAssignment& at, int i) {
    return early ? at.member + i * team : at.part + parts * (at.member + i * team);
  }
  static constexpr int own_step = early ? team : parts * team;  // from one to the next

  // The largest log-sum-exp of the team's lanes, as an ordered integer.
  template <bool marked>
  MLA_DEVICE static int largest_own(const CombineParams& p, const RowAssignment& at) {
    int largest = float_to_ordered_int(at.own[0]);
    for (int i = 1; i < owned; ++i) largest = max_of(largest, float_to_ordered_int(at.own[i]));
#pragma unroll 1  // rows of more splits than lanes are rare; unrolled loops for them cost instruction cache
    for (int split = own_split(at, owned); split < at.splits; split += own_step)
      largest = max_of(largest, float_to_ordered_int(lse_of<marked>(p, at, split)));
    return Wave::template max_over<team>(largest, at.lane);
  }

  // Merges the log-sum-exps of the team's lanes, which are the part's or the row's. `share` becomes e^(lse - largest)
  // of the lane's first splits.
  template <bool marked = false>
  MLA_DEVICE static LseAccum merge_own_lse(const CombineParams& p, RowAssignment& at, float (&share)[owned]) {
    LseAccum all{largest_own<false>(p, at), 0.0f};
    if (marked && all.largest == INFINITY_BITS) [[unlikely]] {  // one comparison for a row, where each lse would cost one
      for (int i = 0; i < owned; ++i) at.own[i] = without_mark(p, at, own_split(at, i), at.own[i]);
      all.largest = largest_own<true>(p, at);
    }
    const float base = all.base();
    const int next = own_split(at, owned);
    float sum = 0.0f;
    for (int i = 0; i < owned; ++i) {
      share[i] = 0.0f;
      if (i != 0 && i * team >= at.splits) continue;  // most rows have no more than a lane's first
      share[i] = exp_of<Wave>(at.own[i] - base);
      sum = i == 0 ? share[i] : sum + share[i];
    }
#pragma unroll 1
    for (int split = next; split < at.splits; split += own_step)
      sum += exp_of<Wave>(lse_of<marked>(p, at, split) - base);
    all.sum = Wave::template sum_over<team>(sum, at.lane);
    return all;
  }

  MLA_DEVICE static int max_of(int a, int b) { return a > b ? a : b; }

  // Merges the parts' accumulators, from shared memory, to the row's.
  MLA_DEVICE static LseAccum merge_parts_lse(const LseAccum* of_parts, const RowAssignment& at) {
    int largest = ORDERED_MINUS_INFINITY;
    for (int part = at.member; part < parts; part += team) largest = max_of(largest, of_parts[part].largest);
    LseAccum all{Wave::template max_over<team>(largest, at.lane), 0.0f};
    float sum = 0.0f;
    for (int part = at.member; part < parts; part += team)
      sum += of_parts[part].sum * exp_of<Wave>(__builtin_fminf(of_parts[part].base() - all.base(), 0.0f));
    all.sum = Wave::template sum_over<team>(sum, at.lane);
    return all;
  }

  // This lane's columns of `in_flight` splits of a part.
  struct Loaded {
    Vec<float, quad> of[in_flight][chunks][vec / quad];

    // Split number i from `split` on, zeros where it is not to be read.
    MLA_DEVICE void load(const CombineParams& p, const RowAssignment& at, int split, int i, bool read) {
      const int64_t in_split = at.row * p.partial_row_stride + at.first_column;
      const float* from = early ? at.partial + (split - at.part + i * parts) * p.partial_split_stride
                                : p.partial_out + ((at.first + split + i * parts) * p.partial_split_stride + in_split);
      for (int c = 0; c < chunks; ++c)
        for (int q = 0; q < vec / quad; ++q) {
          of[i][c][q] = {};
          const float* place = from + (c * team + (early ? 0 : at.member)) * vec + q * quad;
          if (read) of[i][c][q] = *reinterpret_cast<const Vec<float, quad>*>(place);
        }
    }
  };

  // The weight of split `n` of those whose weights the team's lanes know, `owned` each.
  MLA_DEVICE static float weight_of(const RowAssignment& at, const float (&known)[owned], int n) {
    if constexpr (owned == 1) return Wave::template from_team<team>(known[0], at.lane, n);
    float own = known[0];
    for (int i = 1; i < owned; ++i)
      if (n >= i * team) own = known[i];
    return Wave::template from_team<team>(own, at.lane, n % team);
  }

  // Adds weight x partial for `in_flight` splits, or begins the sum with them; their loads are issued before the first
  // addition. A first sum that is not read costs no registers while the loads are out.
  template <bool first>
  MLA_DEVICE static void accumulate(const CombineParams& p, const RowAssignment& at, int split,
                                    const float (&known)[owned], int source, float (&sum)[chunks][vec]) {
    constexpr int apart = early ? parts : 1;
    float weights[in_flight];
    Loaded loaded;
    for (int i = 0; i < in_flight; ++i) weights[i] = weight_of(at, known, source + i * apart);
    for (int i = 0; i < in_flight; ++i) loaded.load(p, at, split, i, bit_cast<int>(weights[i]) != 0);
    add<first>(loaded, weights, sum);
  }

  template <bool first>
  MLA_DEVICE static void add(const Loaded& loaded, const float (&weights)[in_flight], float (&sum)[chunks][vec]) {
    for (int i = 0; i < in_flight; ++i)
      for (int c = 0; c < chunks; ++c)
        for (int k = 0; k < vec; ++k)
          sum[c][k] =
              __builtin_fmaf(weights[i], loaded.of[i][c][k / quad][k % quad], first && i == 0 ? 0.0f : sum[c][k]);
  }

  // Issues the loads of a part's first splits before their weights are known.
  MLA_DEVICE static void load_early(const CombineParams& p, const RowAssignment& at, Loaded& loaded) {
    for (int i = 0; i < in_flight; ++i) loaded.load(p, at, at.part, i, at.part + i * parts < at.splits);
  }

  // Starts the sum with the splits that were loaded early. Data of a split of weight zero is ignored.
  MLA_DEVICE static void accumulate_loaded(Loaded& loaded, const RowAssignment& at, const float (&known)[owned],
                                    float (&sum)[chunks][vec]) {
    float weights[in_flight];
    for (int i = 0; i < in_flight; ++i) {
      weights[i] = weight_of(at, known, at.part + i * parts);
      for (int c = 0; c < chunks; ++c)
        for (int q = 0; q < vec / quad; ++q)
          if (bit_cast<int>(weights[i]) == 0) loaded.of[i][c][q] = {};
    }
    add<true>(loaded, weights, sum);
  }

  // The part's weighted sum where lanes know the row's weights, which are e^(lse - base) x `scale`; `share` has the
  // first factor for their first splits, of which `loaded` are the part's first.
  template <bool marked>
  MLA_DEVICE static void accumulate_early(const CombineParams& p, const RowAssignment& at, float (&share)[owned],
                                          float base, float scale, Loaded& loaded, float (&sum)[chunks][vec]) {
    for (int i = 0; i < owned; ++i) share[i] *= scale;
    accumulate_loaded(loaded, at, share, sum);
    constexpr int group = in_flight * parts, known = owned * team;
#pragma unroll 1
    for (int begin = 0; begin < at.splits; begin += known) {
      if (begin != 0)
        for (int i = 0; i < owned; ++i)
          share[i] = exp_of<Wave>(lse_of<marked>(p, at, begin + own_split(at, i)) - base) * scale;
      const int end = at.splits - begin < known ? at.splits - begin : known;
#pragma unroll 1
      for (int j = at.part + (begin == 0 ? group : 0); j < end; j += group)
        accumulate<false>(p, at, begin + j, share, j, sum);
    }
  }

  // The part's weighted sum. `share` is e^(lse - base) of the lane's first split.
  template <bool marked>
  MLA_DEVICE static void accumulate_part(const CombineParams& p, const RowAssignment& at, float share, float base,
                                         float scale, float (&sum)[chunks][vec]) {
    float weight[owned] = {share * scale};
    accumulate<true>(p, at, at.part, weight, 0, sum);
#pragma unroll 1
    for (int begin = at.part; begin < at.splits; begin += parts * team) {
      if (begin != at.part) weight[0] = exp_of<Wave>(lse_of<marked>(p, at, begin + parts * at.member) - base) * scale;
      const int left = static_cast<uint32_t>(at.splits - begin + parts - 1) / parts;
      const int count = left < team ? left : team;
#pragma unroll 1
      for (int j = begin == at.part ? in_flight : 0; j < count; j += in_flight)
        accumulate<false>(p, at, begin + j * parts, weight, j, sum);
    }
  }

  MLA_DEVICE static void read_own(const CombineParams& p, RowAssignment& at) {
    for (int i = 0; i < owned; ++i) at.own[i] = lse_of(p, at, own_split(at, i));
  }

  // Brings the parameters that are needed behind the wait to the constant cache.
  MLA_DEVICE static void materialize_params(const CombineParams& p) {
    Wave::materialize(p.partial_out, p.partial_row_stride);
    if constexpr (early) Wave::materialize(p.lse_batch_stride);
  }

  MLA_DEVICE static void run(const CombineParams& p) {
    RowAssignment at;
    const uint32_t sequence = team_of(p, static_cast<uint32_t>(block_id_x()), static_cast<uint32_t>(p.batch), at);
    materialize_params(p);
    const bool known = early && p.split_indptr == nullptr && p.cu_seqlens_q == nullptr;
    if (known) {
      resolve_splits(p, sequence, at);
      Wave::materialize(at.lse, at.partial, at.sink);
    }
    Wave::release_consumer();   // while decode runs: the next kernel waits for this launch, and so for decode
    Wave::wait_for_producer();  // everything above is computed while decode runs
    if (!known) resolve_splits(p, sequence, at);
    read_own(p, at);
    if (parts > 1 || at.wanted) merge<true>(p, at);  // several parts share barriers, wanted or not
  }

  // One row, from its log-sum-exps to its outputs.
  template <bool marked = false>
  MLA_DEVICE static void merge(const CombineParams& p, RowAssignment& at) {
    Loaded first;
    float sink = 0.0f;
    if constexpr (early) {
      load_early(p, at, first);
      if (at.sink != nullptr) sink = *at.sink;
    }
    float share[owned];
    LseAccum row = merge_own_lse<marked>(p, at, share);
    if constexpr (parts > 1 && !early) {
      MLA_SHARED LseAccum of_parts[Shape::rows * parts];
      if (at.member == 0) of_parts[at.index] = row;
      block_sync();
      row = merge_parts_lse(of_parts + at.index / parts * parts, at);
      share[0] = exp_of<Wave>(at.own[0] - row.base());
    }
    if constexpr (!early) write_lse(p, at, row);
    float scale;
    const Outcome outcome = find_scale(p, row, scale, [&] { return early ? sink : *sink_at(p, at); });
    float sum[chunks][vec] = {};
    if (outcome == SUM) {
      if constexpr (early)
        accumulate_early<marked>(p, at, share, row.base(), scale, first, sum);
      else
        accumulate_part<marked>(p, at, share[0], row.base(), scale, sum);
    }
    write_out(p, at, outcome, sum);
    if constexpr (early) write_lse(p, at, row);  // now no sum waits for it
  }

  // Writes the row's log-sum-exp; where every part knows it the last one does, which has the least to store.
  MLA_DEVICE static void write_lse(const CombineParams& p, const RowAssignment& at, const LseAccum& row) {
    if (at.wanted && at.part == (early ? parts - 1 : 0) && at.first_column == 0 && at.member == 0) {
      const int64_t head = at.head * p.lse_head_stride;
      if constexpr (Wave::lse_anywhere)
        p.lse[lse_of_token(p, at.token) + head] =
            row.largest == ORDERED_MINUS_INFINITY ? p.empty_lse : lse_of_row(row);
      else
        p.lse[at.token * p.lse_token_stride + head] = lse_of_row(row);
    }
  }

  // Returns the row's outcome, and its scale; `read_sink` reads the row's sink where rows have sinks.
  template <class ReadSink>
  MLA_DEVICE static Outcome find_scale(const CombineParams& p, const LseAccum& row, float& scale, ReadSink read_sink) {
    Outcome outcome = outcome_of(row);
    scale = scale_of(row);
    if (p.attn_sink != nullptr) {
      const float sink = read_sink();
      outcome = outcome_of(row, sink);
      scale = scale_of(row, sink);
    }
    return outcome;
  }

  // Adds the sums of all parts and stores the results.
  MLA_DEVICE static void write_out(const CombineParams& p, const RowAssignment& at, Outcome outcome,
                                const float (&sum)[chunks][vec]) {
    const int64_t out = at.token * p.out_token_stride + at.head * p.out_head_stride + at.first_column;
    if constexpr (parts == 1) {
      for (int c = 0; c < chunks; ++c) store(p, out + (c * team + at.member) * vec, outcome, sum[c]);
    } else {
      alignas(16) MLA_SHARED float sums[Shape::rows * parts][columns];
      for (int c = 0; c < chunks; ++c)
        for (int q = 0; q < vec; q += quad) {
          Vec<float, quad> wide;
          for (int k = 0; k < quad; ++k) wide[k] = sum[c][q + k];
          *reinterpret_cast<Vec<float, quad>*>(&sums[at.index][(c * team + at.member) * vec + q]) = wide;
        }
      block_sync();
      const int first = at.index / parts * parts;
      for (int begin = (at.part * team + at.member) * vec; at.wanted && begin < columns; begin += parts * team * vec) {
        float total[vec] = {};
        for (int other = first; other < first + parts; ++other)
          for (int k = 0; k < vec; ++k) total[k] += sums[other][begin + k];
        store(p, out + begin, outcome, total);
      }
    }
  }

  MLA_DEVICE static void store(const CombineParams& p, int64_t at, Outcome outcome, const float (&values)[vec]) {
    if (outcome == NOT_A_NUMBER) {
      float none[vec];
      for (int k = 0; k < vec; ++k) none[k] = Wave::not_a_number();
      store_as<Wave, vec>(p.out, p.out_type, at, none);
    } else {
      store_as<Wave, vec>(p.out, p.out_type, at, values);
    }
  }
};

}  // namespace mla
