// Rows that decode's clusters have merged to the end (decode/plan_pair.hpp): combine leaves them as they are.
#pragma once

#include "common/combine.hpp"
#include "sm_90/combine/sentinel.hpp"
#include "sm_90/wave.hpp"

namespace mla::sm_90 {

struct MergedRows {
  // The value of `skip_none` behind a decode that may have merged rows.
  static constexpr int MAY_BE_MERGED = 2;

  // Whether the row's first split has SENTINEL as its log-sum-exp. All teams of a row know; called by whole warps.
  template <class Merge>
  MLA_DEVICE static bool leaves_out(const CombineParams& p, const typename Merge::RowAssignment& at) {
    static_assert(Merge::parts == 1 || Merge::early, "the first lane of every team has read the row's first split");
    if (p.skip_none != MAY_BE_MERGED) return false;
    return bit_cast<uint32_t>(Wave::from_team<Merge::team>(at.own[0], at.lane, 0)) == SENTINEL;
  }

  // Combine::run for the rows that are left.
  template <class Merge>
  MLA_DEVICE static void run(const CombineParams& p) {
    typename Merge::RowAssignment at;
    const uint32_t sequence =
        Merge::team_of(p, static_cast<uint32_t>(block_id_x()), static_cast<uint32_t>(p.batch), at);
    Merge::materialize_params(p);
    Wave::release_consumer();  // while decode runs: the next kernel waits for this launch, and so for decode
    Wave::wait_for_producer();
    Merge::resolve_splits(p, sequence, at);
    Merge::read_own(p, at);
    static_assert(Merge::parts == 1 || Merge::threads == Merge::parts * Merge::team, "a block that meets has one row");
    if (leaves_out<Merge>(p, at)) return;
    if (Merge::parts > 1 || at.wanted) Merge::merge(p, at);
  }
};

}  // namespace mla::sm_90
