// combine for sequences that all have the same number of splits, known when the kernel is compiled. It has no loop over
// splits, does not look up where a sequence's splits begin, and exchanges no log-sum-exps between the parts of a row,
// because lane i of every part owns that of split i.
//
// It takes num_splits equal to FIXED, and neither split_indptr, cu_seqlens_q, skip_none nor skip_single.
#pragma once

#include "common/combine.hpp"

namespace mla {

template <class Wave, class Shape, int FIXED>
struct FixedSplitsCombine : Combine<Wave, Shape> {
  using Base = Combine<Wave, Shape>;
  using typename Base::RowAssignment;
  using Base::in_flight;
  using Base::owned;
  using Base::parts;
  using Base::team;
  static constexpr int min_waves = 4;  // resident: eight splits of a row are read together, so a lane needs registers
  static constexpr int rounds = (FIXED + parts * in_flight - 1) / (parts * in_flight);  // of loads of a part

  static_assert(!Base::early && owned == 1, "combine: a fixed number of splits is for archs that do not read early");
  static_assert(FIXED >= 1 && rounds * parts * in_flight <= team, "combine: every split needs a lane of its own");

  MLA_DEVICE static void run(const CombineParams& p) {
    RowAssignment at;
    const uint32_t sequence =
        Base::team_of(p, static_cast<uint32_t>(block_id_x()), static_cast<uint32_t>(p.batch), at);
    at.first = static_cast<int64_t>(sequence) * FIXED;
    at.splits = FIXED;
    at.token += static_cast<int>(sequence) * p.q_len;
    if (parts > 1 || at.wanted) merge(p, at);  // rows that are not wanted merge row 0, and write nothing
  }

 private:
  MLA_DEVICE static void merge(const CombineParams& p, const RowAssignment& at) {
    float lse = Base::template lse_of<false>(p, at, at.member);
    LseAccum row{Wave::template max_over<team>(float_to_ordered_int(lse), at.lane), 0.0f};
    if (row.largest == INFINITY_BITS) [[unlikely]] {
      lse = Base::without_mark(p, at, at.member, lse);
      row.largest = Wave::template max_over<team>(float_to_ordered_int(lse), at.lane);
    }
    const float share = exp_of<Wave>(lse - row.base());
    row.sum = Wave::template sum_over<team>(share, at.lane);
    Base::write_lse(p, at, row);
    float scale;
    const typename Base::Outcome outcome = Base::find_scale(p, row, scale, [&] { return *Base::sink_at(p, at); });
    float sum[Base::chunks][Base::vec] = {};
    if (outcome == Base::SUM) accumulate(p, at, share * scale, sum);
    Base::write_out(p, at, outcome, sum);
  }

  // The part's weighted sum; lane i has the weight of split i, which is 0 beyond the last.
  MLA_DEVICE static void accumulate(const CombineParams& p, const RowAssignment& at, float weight,
                                    float (&sum)[Base::chunks][Base::vec]) {
#pragma unroll 8 / in_flight
    for (int round = 0; round < rounds; ++round) {
      const int first = at.part + round * in_flight * parts;
      float weights[in_flight];
      typename Base::Loaded loaded;
      for (int i = 0; i < in_flight; ++i)
        weights[i] = Wave::template from_team<team>(weight, at.lane, first + i * parts);
      for (int i = 0; i < in_flight; ++i) loaded.load(p, at, first, i, bit_cast<int>(weights[i]) != 0);
      if (round == 0)
        Base::template add<true>(loaded, weights, sum);
      else
        Base::template add<false>(loaded, weights, sum);
    }
  }
};

}  // namespace mla
