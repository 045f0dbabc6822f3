// combine behind a decode that followed a plan: a few workgroups that stay, and walk the rows of those sequences that
// the plan split. It is launched whether or not anything was, for only the device knows: then all that it does is to
// read the plan's counts, while decode runs. One source for every arch.
//
// A turn of a workgroup is either `waves` rows, a wave each, or some columns of one row, whose splits its waves share.
#pragma once

#include "common/combine.hpp"
#include "common/plan_header.hpp"

namespace mla {

// The turns of all sequences that a plan split, in order, as a wave finds them: four sequences a lane at a time.
template <class Wave>
class PlannedTurns {
 public:
  struct Turn {
    int sequence;  // -1: there are no more
    int number;    // among the turns of the sequence
    int first;     // partial of the sequence
    int splits;
  };

  MLA_DEVICE explicit PlannedTurns(const CombineParams& p) { read(p, 0); }

  // What a sequence takes is known when the plan's counts are: `turns` of its splits.
  template <class TurnsOf>
  MLA_DEVICE void count(TurnsOf turns) {
    sum_ = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) sum_ += turns(bounds_[i + 1] - bounds_[i]);
    const int lane = thread_id() % Wave::lanes;
#pragma unroll
    for (int apart = 1; apart < Wave::lanes; apart *= 2) {
      const int other = Wave::from_lane(sum_, lane >= apart ? lane - apart : lane);
      if (lane >= apart) sum_ += other;
    }
  }

  // Number `index`, the same in all lanes and not below the one that was asked for last.
  template <class TurnsOf>
  MLA_DEVICE Turn find(const CombineParams& p, int index, TurnsOf turns) {
    for (;;) {
      const int lane = Wave::count(before_ + sum_ <= index);
      if (lane < Wave::lanes) {
        // This lane's four, as if they were the ones; those of `lane` are taken.
        int number = index - before_ - sum_, sequence = 0, first = 0, splits = 0;
#pragma unroll
        for (int i = each - 1; i >= 0; --i) {
          const int own = bounds_[i + 1] - bounds_[i];
          if (number < 0) {
            number += turns(own);
            sequence = i;
            first = bounds_[i];
            splits = own;
          }
        }
        return {base_ + lane * each + Wave::from_lane(sequence, lane), Wave::from_lane(number, lane),
                Wave::from_lane(first, lane), Wave::from_lane(splits, lane)};
      }
      if (base_ + each * Wave::lanes >= p.batch) return {-1, 0, 0, 0};
      before_ += Wave::from_lane(sum_, Wave::lanes - 1);
      read(p, base_ + each * Wave::lanes);
      count(turns);
    }
  }

 private:
  static constexpr int each = 4;

  MLA_DEVICE void read(const CombineParams& p, int base) {
    base_ = base;
#pragma unroll
    for (int i = 0; i <= each; ++i) {
      const int bound = base + thread_id() % Wave::lanes * each + i;
      bounds_[i] = p.split_indptr[bound < p.batch ? bound : p.batch];
    }
  }

  int base_;        // the first sequence that was read
  int before_ = 0;  // turns before it
  int sum_;         // turns of this lane's sequences and those of the lanes before
  int bounds_[each + 1];
};

// `resident`: waves that the device holds; `slices`: workgroups for a row that its waves share.
template <class Wave, int head_dim_v_, int waves_, int slices_, int resident>
struct PlannedCombine {
  struct RowEach {
    static constexpr int head_dim_v = head_dim_v_, rows = waves_, vec = 4, waves = waves_, slices = 1;
  };
  struct RowTogether {
    static constexpr int head_dim_v = head_dim_v_, rows = 1, vec = 4, waves = waves_, slices = slices_;
  };
  using Each = Combine<Wave, RowEach>;
  using Together = Combine<Wave, RowTogether>;
  static constexpr int threads = Each::threads;
  static constexpr int min_waves = Each::min_waves;
  static_assert(Each::team == Wave::lanes, "planned combine: the lanes of a wave look for one turn");

  // Which turns a sequence takes. A row has a wave to itself, unless its splits are many beside what a wave would have
  // if all had the same: a workgroup would wait as long for two of them as for four of each wave's.
  struct Turns {
    int rows;         // of a sequence
    int most_splits;  // of a row with one wave
    static constexpr int LEAST_TOGETHER = 4;

    MLA_DEVICE Turns(const CombineParams& p, int partials) : rows(p.q_len * p.heads) {
      const int64_t of_waves = static_cast<int64_t>(partials) * rows * 2 / resident;  // twice the mean
      most_splits = of_waves < LEAST_TOGETHER ? LEAST_TOGETHER : static_cast<int>(of_waves);
    }
    MLA_DEVICE bool together(int splits) const { return splits > most_splits; }
    MLA_DEVICE int operator()(int splits) const {
      if (splits == 0) return 0;
      return together(splits) ? rows * RowTogether::slices : (rows + waves_ - 1) / waves_;
    }
  };

  MLA_DEVICE static void run(const CombineParams& p) {
    // The plan is older than decode, all of whose workgroups have waited for what came before them.
    const int partials = p.split_indptr[PlanHeader::partial_rows - PlanHeader::words];
    PlannedTurns<Wave> list(p);
    if (partials == 0) {
      Wave::wait_for_producer();  // who follows waits for this launch alone
      Wave::release_consumer();
      return;
    }
    const Turns turns(p, partials);
    list.count(turns);
    int index = block_id_x();
    auto turn = list.find(p, index, turns);
    Wave::wait_for_producer();
    Wave::release_consumer();
#pragma unroll 1
    while (turn.sequence >= 0) {
      if (turns.together(turn.splits))
        merge<Together>(p, turn);
      else
        merge<Each>(p, turn);
      index += p.workgroups;
      turn = list.find(p, index, turns);
    }
  }

 private:
  template <class Merge>
  MLA_DEVICE static void merge(const CombineParams& p, const typename PlannedTurns<Wave>::Turn& turn) {
    typename Merge::Place at;
    Merge::team_of(p, turn.number, 1, at);
    at.first = turn.first;
    at.splits = turn.splits;
    Merge::settle(p, turn.sequence, at);
    Merge::read_own(p, at);
    if (Merge::parts > 1 || at.wanted) Merge::merge(p, at);
    if constexpr (Merge::parts > 1) block_sync();  // the next turn's sums come to where this one's are read
  }
};

}  // namespace mla
