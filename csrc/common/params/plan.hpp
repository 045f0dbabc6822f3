// The launch parameters of plan: the lengths, the words it makes, and where its parts lie (ops/plan/metadata.py).
#pragma once
#include "common/device.hpp"

namespace mla {
struct PlanParams {
  const int32_t* seq_lens;       // [batch] keys
  const int32_t* cu_seqlens_q;   // [batch + 1], or null: every sequence has q_len query tokens
  int32_t* plan;                 // [words]: header, split_indptr, work_indptr, counters, work tiles
  int32_t work_tile_cost;        // fixed cost of a work tile, in keys
  int32_t partial_cost;          // cost of a partial to the one CTA that writes or reads it, in keys
  int32_t shared_cost;           // cost of a partial to the whole device, in keys
  int32_t q_len;                 // query tokens of each sequence without cu_seqlens_q
  int32_t window_left;           // keys left of a query token, without its own, that it sees; negative: all
  int32_t splits;                // of each sequence with num_splits, the most of one with split_size, else 0
  int32_t workgroups;            // of the launch
  // The header's words in order, but for work tiles used and partial rows, which the kernel counts.
  int32_t magic;                 // that says it is a plan
  int32_t version;               // of these words
  int32_t batch;                 // sequences
  int32_t num_sm_parts;          // SM parts that share the work tiles
  int32_t work_tile_capacity;    // work tiles that there is room for
  int32_t split_indptr;          // offset in words, as the next three: of each sequence's partial rows
  int32_t work_indptr;           // of the first work tile of each SM part
  int32_t counters;              // of the arrival counters
  int32_t work_tiles;            // of the work tiles
  int32_t work_tile_words;       // words of a work tile
  int32_t num_splits;            // of each sequence where they are asked for, else 0
  int32_t split_size;            // keys per split in the batch-invariant mode, else 0
  int32_t counters_per_sequence;  // arrival counters of a sequence
  int32_t max_seqlen_kv;         // keys of the longest sequence that there may be, or 0
  int32_t dealt;                 // no word: chunks tried for a plan that deals sequences out of order, where one may
};
}  // namespace mla
