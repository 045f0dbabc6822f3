// combine behind a decode with a plan: a persistent grid that walks the rows of those sequences that the plan split. It
// is launched whether or not anything was split, because only the device knows; if nothing was, it only reads the
// plan's counts, while decode runs. One source for every arch.
//
// One turn of a workgroup is either `waves` rows, one for each wave, or some columns of one row, whose splits its waves
// share.
#pragma once

#include "common/combine.hpp"
#include "common/plan_header.hpp"

namespace mla {

// The turns of all sequences that a plan split, in order. A wave finds them together, four sequences a lane at a time.
template <class Wave>
class TurnScheduler {
 public:
  struct Turn {
    int sequence;  // -1 at the end
    int number;    // among the turns of the sequence
    int first;     // first partial of the sequence
    int splits;
  };

  MLA_DEVICE explicit TurnScheduler(const CombineParams& p) { read(p, 0); }

  // Counts the turns of the sequences read so far; `turns` maps a number of splits to a number of turns. Called once
  // the plan's counts are known.
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

  // Turn number `index`, which is the same in all lanes and not below the last one asked for.
  template <class TurnsOf>
  MLA_DEVICE Turn find(const CombineParams& p, int index, TurnsOf turns) {
    for (;;) {
      const int lane = Wave::count(before_ + sum_ <= index);
      if (lane < Wave::lanes) {
        // Every lane searches its own four sequences; the result of `lane` is taken.
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

// Every row of a sequence that was split is combined.
struct EveryRow {
  template <class Merge>
  MLA_DEVICE static bool leaves_out(const CombineParams&, const typename Merge::RowAssignment&) {
    return false;
  }
};

// `resident` is the number of waves that the device holds; `slices` workgroups share a row whose splits are shared.
// `Rows::leaves_out` is asked once a row's log-sum-exps are read.
template <class Wave, int head_dim_v_, int waves_, int slices_, int resident, class Rows = EveryRow>
struct PersistentCombine {
  struct RowPerWave {
    static constexpr int head_dim_v = head_dim_v_, rows = waves_, vec = 4, waves = waves_, slices = 1;
  };
  struct RowPerBlock {
    static constexpr int head_dim_v = head_dim_v_, rows = 1, vec = 4, waves = waves_, slices = slices_;
  };
  using PerWave = Combine<Wave, RowPerWave>;
  using PerBlock = Combine<Wave, RowPerBlock>;
  static constexpr int threads = PerWave::threads;
  static constexpr int min_waves = PerWave::min_waves;
  static_assert(PerWave::team == Wave::lanes, "persistent combine: the lanes of a wave look for one turn");

  // The turns of a sequence. A row has a wave to itself unless it has many more splits than an even share of a wave: a
  // workgroup waits as long for two splits as for four of each wave.
  struct Turns {
    int rows;         // of a sequence
    int max_wave_splits;  // of a row that one wave takes
    static constexpr int MIN_BLOCK_SPLITS = 4;

    MLA_DEVICE Turns(const CombineParams& p, int partials) : rows(p.q_len * p.heads) {
      const int64_t of_waves = static_cast<int64_t>(partials) * rows * 2 / resident;  // twice the mean
      max_wave_splits = of_waves < MIN_BLOCK_SPLITS ? MIN_BLOCK_SPLITS : static_cast<int>(of_waves);
    }
    MLA_DEVICE bool per_block(int splits) const { return splits > max_wave_splits; }
    MLA_DEVICE int operator()(int splits) const {
      if (splits == 0) return 0;
      return per_block(splits) ? rows * RowPerBlock::slices : (rows + waves_ - 1) / waves_;
    }
  };

  MLA_DEVICE static void run(const CombineParams& p) {
    // The plan is older than decode, whose workgroups have all waited for the kernels before them.
    const int partials = p.split_indptr[PlanHeader::partial_rows - PlanHeader::words];
    TurnScheduler<Wave> list(p);
    if (partials == 0) {
      Wave::release_consumer();
      Wave::wait_for_producer();  // the next kernel waits for this launch alone
      return;
    }
    const Turns turns(p, partials);
    list.count(turns);
    int index = block_id_x();
    auto turn = list.find(p, index, turns);
    Wave::release_consumer();
    Wave::wait_for_producer();
#pragma unroll 1
    while (turn.sequence >= 0) {
      if (turns.per_block(turn.splits))
        merge<PerBlock>(p, turn);
      else
        merge<PerWave>(p, turn);
      index += p.workgroups;
      turn = list.find(p, index, turns);
    }
  }

 private:
  template <class Merge>
  MLA_DEVICE static void merge(const CombineParams& p, const typename TurnScheduler<Wave>::Turn& turn) {
    typename Merge::RowAssignment at;
    Merge::team_of(p, turn.number, 1, at);
    at.first = turn.first;
    at.splits = turn.splits;
    Merge::resolve_rows(p, turn.sequence, at);
    Merge::read_own(p, at);
    if (Rows::template leaves_out<Merge>(p, at)) return;
    if (Merge::parts > 1 || at.wanted) Merge::merge(p, at);
    if constexpr (Merge::parts > 1) block_sync();  // the next turn's sums overwrite this one's
  }
};

}  // namespace mla
