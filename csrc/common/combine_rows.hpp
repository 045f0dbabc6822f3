// Which row, columns and splits a lane of combine works on, and how many of each a workgroup has.
#pragma once

#include "common/combined_row.hpp"
#include "common/division.hpp"
#include "common/params/combine.hpp"

namespace mla {

template <class Wave, class Shape>
struct CombineRows : CombinedRow<Wave> {
  static constexpr int columns = Shape::head_dim_v / Shape::slices;  // of a row, per workgroup
  static constexpr int vec = Shape::vec;
  static constexpr int quad = vec < 4 ? vec : 4;  // floats per load
  static constexpr int team = columns / vec < Wave::lanes ? columns / vec : Wave::lanes;
  static constexpr int chunks = columns / (team * vec);
  static constexpr int threads = Shape::waves * Wave::lanes;
  static constexpr int parts = threads / team / Shape::rows;
  static constexpr bool early = Wave::reads_early && parts > 1;  // loads first splits before it knows their weights
  static constexpr bool alone = Shape::waves == 1;                // one wave sums all splits: only loads hide latency
  static constexpr int in_flight = alone ? 8 : parts > 1 ? 4 : 2;  // splits read together by a team
  static constexpr int owned = early ? 4 : 1;                    // splits whose weights a lane keeps
  static constexpr int min_waves = alone || parts > 1 ? 4 : 8;    // resident: one wave per row needs many rows

  static_assert(vec == 1 || vec == 2 || vec == 4 || vec == 8, "combine: VEC is 1, 2, 4 or 8");
  static_assert(Shape::rows == 1 || Shape::rows == 2 || Shape::rows == 4 || Shape::rows == 8,
                "combine: ROWS is 1, 2, 4 or 8");
  static_assert(Shape::head_dim_v % Shape::slices == 0 && columns % vec == 0 && columns % (team * vec) == 0,
                "combine: SLICES must divide D_V into whole vectors of VEC for whole teams");
  static_assert((team & (team - 1)) == 0 && team >= 4, "combine: a row needs a power of two of at least 4 lanes");
  static_assert(team % in_flight == 0, "combine: splits are read in whole groups of a team's lanes");
  static_assert(!early || owned * team % (in_flight * parts) == 0,
                "combine: the weights that lanes keep make whole groups of each part");
  static_assert(parts >= 1 && parts * team * Shape::rows == threads, "combine: WAVES are too few for ROWS");

  // The row, the columns and the splits that this lane works on.
  struct RowAssignment {
    int lane;    // in the wave
    int member;  // in the team
    int index;   // of the team in the workgroup
    int part;    // of the row's splits
    int row;     // of the sequence
    int token;   // of out
    int head;
    int first_column;  // of the workgroup
    int splits;        // of the sequence
    int64_t first;     // split of the sequence
    bool wanted;       // the row is to be written
    float own[owned];  // log-sum-exps of the lane's first splits
    const float* lse;      // where loads are early: log-sum-exp of the lane's first split,
    const float* partial;  // this lane's columns of the part's first split,
    const float* sink;     // and the row's sink, or null
  };

  // Finds the sequence's splits, then its rows.
  MLA_DEVICE static void resolve_splits(const CombineParams& p, uint32_t sequence, RowAssignment& at) {
    at.first = static_cast<int64_t>(sequence) * p.num_splits;
    at.splits = p.num_splits;
    if (p.split_indptr != nullptr) {
      const int32_t begin = p.split_indptr[sequence];
      at.first = begin;
      at.splits = p.split_indptr[sequence + 1] - begin;
    }
    resolve_rows(p, sequence, at);
  }

  // Fills in what follows from numbers alone: rows are numbered through all `sequences`. Returns the sequence's number.
  MLA_DEVICE static uint32_t team_of(const CombineParams& p, uint32_t group, uint32_t sequences, RowAssignment& at) {
    const int thread = thread_id();
    const uint32_t rows = static_cast<uint32_t>(p.q_len) * static_cast<uint32_t>(p.heads);
    at.lane = thread % Wave::lanes;
    at.member = at.lane % team;
    at.index = thread / team;
    if constexpr (team == Wave::lanes) at.index = Wave::uniform(at.index);
    at.part = at.index % parts;
    const uint32_t of_batch = group / Shape::slices * Shape::rows + at.index / parts;
    at.first_column = static_cast<int>(group % Shape::slices) * columns;
    at.wanted = of_batch < sequences * rows;
    const uint32_t sequence = divided(at.wanted ? of_batch : 0, p.rows_reciprocal, p.rows_shift);
    at.row = at.wanted ? static_cast<int>(of_batch - sequence * rows) : 0;
    at.token = static_cast<int>(divided(at.row, p.heads_reciprocal, p.heads_shift));
    at.head = at.row - at.token * p.heads;
    return sequence;
  }

  // Fills in the rest, once the sequence and its splits are known.
  MLA_DEVICE static void resolve_rows(const CombineParams& p, uint32_t sequence, RowAssignment& at) {
    int first_token = static_cast<int>(sequence) * p.q_len;
    if (p.cu_seqlens_q != nullptr) {
      first_token = p.cu_seqlens_q[sequence];
      at.wanted = at.wanted && at.token < p.cu_seqlens_q[sequence + 1] - first_token;
    }
    at.token += first_token;
    at.wanted = at.wanted && !(p.skip_single != 0 && at.splits == 1) && !(p.skip_none != 0 && at.splits == 0);
    if (!at.wanted) at.splits = 0;
    if constexpr (early) resolve_addresses(p, at);
  }

  MLA_DEVICE static void resolve_addresses(const CombineParams& p, RowAssignment& at) {
    at.lse = p.partial_lse + ((at.first + at.member) * p.partial_lse_split_stride + at.row * p.partial_lse_row_stride);
    at.partial = p.partial_out + ((at.first + at.part) * p.partial_split_stride + at.row * p.partial_row_stride +
                                  at.first_column + at.member * vec);
    at.sink = p.attn_sink == nullptr ? nullptr : sink_at(p, at);
  }

  // Returns where the logit of the row's sink lies, if rows have sinks.
  MLA_DEVICE static const float* sink_at(const CombineParams& p, const RowAssignment& at) {
    return p.attn_sink + static_cast<uint32_t>(at.row) % static_cast<uint32_t>(p.sink_heads);
  }
};

}  // namespace mla
