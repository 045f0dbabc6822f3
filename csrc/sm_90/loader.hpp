// Keys on their way to shared memory, run ahead of their use by the stages of the ring.
#pragma once

#include "sm_90/mbarrier.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/work.hpp"

namespace mla::sm90 {

// The work of this block: consecutive blocks take the row tiles of one worker.
template <class Policy>
MLA_DEVICE WorkList work_list(const DecodeParams& params) {
  const int block = static_cast<int>(blockIdx.x);
  return WorkList(params, block / params.row_tiles, block % params.row_tiles * ROWS, Policy::GRANULE, Policy::KEYS);
}

// Walks the work list block of keys by block of keys, as far ahead as the ring of stages allows.
template <class Policy>
class Loader {
 public:
  MLA_DEVICE Loader(const DecodeParams& params, uint32_t shared, int thread)
      : params_(params), barriers_(shared), shared_(shared + Policy::KV_OFFSET), thread_(thread) {}

  MLA_DEVICE void run() {
    if (Policy::SOURCE == Source::tma && thread_ >= 32) return;  // one thread asks the copy engine
    WorkList work = work_list<Policy>(params_);
    Item item;
    Ring<Policy::STAGES> ring;
    while (work.next(item)) {
      const int32_t* pages = params_.block_table != nullptr
                                 ? params_.block_table + item.sequence * params_.block_table_stride
                                 : params_.kv_indices + __ldg(params_.kv_indptr + item.sequence);
      for (int first = item.first; first < item.end; first += Policy::KEYS) {
        if constexpr (Policy::SOURCE == Source::tma) boxes(pages, first, item.end, ring);
        else gather(pages, first, item.end, ring);
        ring.next();
      }
    }
  }

 private:
  // Any page size: every thread copies 16-byte pieces. A warp takes four keys of 128 contiguous bytes each, so memory is
  // read in whole lines, and the swizzle spreads its writes over all banks.
  MLA_DEVICE void gather(const int32_t* pages, int first, int end, const Ring<Policy::STAGES>& ring) {
    const int piece = thread_ % 8;
    const int slot = thread_ / 8;  // this thread's keys are slot, slot + 16, ...
    const char* cache = static_cast<const char*>(params_.kv_cache);
    const char* from[Policy::KEYS / 16];
#pragma unroll
    for (int i = 0; i < Policy::KEYS / 16; ++i) {
      const int key = first + slot + 16 * i;
      from[i] = nullptr;
      if (key < end) {
        const int in_table = key / params_.page;
        const int64_t number = __ldg(pages + in_table);
        from[i] = cache + piece * 16 +
                  2 * (number * params_.kv_page_stride + (key - in_table * params_.page) * params_.kv_token_stride);
      }
    }
    const uint32_t to = shared_ + ring.stage * Policy::STAGE_BYTES + slot * 128 + ((piece ^ (slot & 7)) << 4);
    barrier_wait(barriers_.kv_empty(ring.stage), ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < Policy::KEYS / 16; ++i) {
      const bool valid = from[i] != nullptr;
      const char* row = valid ? from[i] : cache;  // nothing is read when not valid
#pragma unroll
      for (int c = 0; c < Policy::COLUMN_BLOCKS; ++c) copy16(to + c * Policy::BLOCK_BYTES + i * 2048, row + c * 128, valid);
    }
    copies_arrive(barriers_.kv_full(ring.stage));
  }

  // Pages that are multiples of a box, and items that begin at multiples of one: a box is rows of one page. Keys of the
  // last box past the item's end come along and are made harmless by the scores warpgroup.
  MLA_DEVICE void boxes(const int32_t* pages, int first, int end, const Ring<Policy::STAGES>& ring) {
    constexpr int BOXES = Policy::KEYS / Policy::BOX;
    int number[BOXES], row[BOXES];
    int count = 0;
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
      const int key = first + i * Policy::BOX;
      if (key >= end) break;
      const int in_table = key / params_.page;
      row[i] = key - in_table * params_.page;
      number[i] = __ldg(pages + in_table);
      ++count;
    }
    const uint32_t stage = shared_ + ring.stage * Policy::STAGE_BYTES;
    const uint32_t full = barriers_.kv_full(ring.stage);
    barrier_wait(barriers_.kv_empty(ring.stage), ring.parity ^ 1);
    if (thread_ != 0) return;
    barrier_expect(full, count * (Policy::STAGE_BYTES / BOXES));
#pragma unroll
    for (int i = 0; i < BOXES; ++i)
      if (i < count)
#pragma unroll
        for (int c = 0; c < Policy::COLUMN_BLOCKS; ++c)
          copy_box(stage + c * Policy::BLOCK_BYTES + i * Policy::BOX * 128, &params_.kv_map_0, c * 64, row[i], number[i],
                   full);
  }

  const DecodeParams& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int thread_;
};

}  // namespace mla::sm90
