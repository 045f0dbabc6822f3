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

// Walks the work list block of keys by block of keys. Each values warpgroup brings the columns that it alone will read
// as values, into the memory that it has just finished reading: nobody else has to agree that it is free.
template <class Policy>
class Loader {
 public:
  MLA_DEVICE Loader(const DecodeParams& params, uint32_t shared, int side, int thread)
      : params_(params), barriers_(shared), work_(work_list<Policy>(params)), side_(side), thread_(thread) {
    shared_ = shared + Policy::KV_OFFSET;
    more_ = next_item();
  }

  // Starts the copies of the next block, if there is one, into the next stage.
  MLA_DEVICE void next() {
    if (!more_) return;
    if constexpr (Policy::SOURCE == Source::tma) boxes();
    else gather();
    ring_.next();
    first_ += Policy::KEYS;
    if (first_ >= end_) more_ = next_item();
  }

 private:
  // Any page size: every thread copies 16-byte pieces. A warp takes four keys of 128 contiguous bytes each, so memory is
  // read in whole lines, and the swizzle spreads its writes over all banks.
  MLA_DEVICE void gather() {
    const int piece = thread_ % 8;
    const int slot = thread_ / 8;  // this thread's keys are slot, slot + 16, ...
    const uint32_t to = shared_ + ring_.stage * Policy::STAGE_BYTES + slot * 128 + ((piece ^ (slot & 7)) << 4);
    const char* cache = static_cast<const char*>(params_.kv_cache);
    const int begin = side_ == 0 ? 0 : 4;
    const int count = side_ == 0 ? 4 : Policy::COLUMN_BLOCKS - 4;
    const char* from[Policy::KEYS / 16];
#pragma unroll
    for (int i = 0; i < Policy::KEYS / 16; ++i) {
      const int key = first_ + slot + 16 * i;
      from[i] = nullptr;
      if (key < end_) {
        const int in_table = key / params_.page;
        const int64_t number = __ldg(pages_ + in_table);
        from[i] = cache + piece * 16 + begin * 128 +
                  2 * (number * params_.kv_page_stride + (key - in_table * params_.page) * params_.kv_token_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < Policy::KEYS / 16; ++i) {
      const bool valid = from[i] != nullptr;
      for (int c = 0; c < count; ++c)
        copy16(to + (begin + c) * Policy::BLOCK_BYTES + i * 2048, valid ? from[i] + c * 128 : cache, valid);
    }
    copies_arrive(barriers_.kv_full(ring_.stage));
  }

  // Pages that are multiples of KEYS, and blocks that begin at multiples of KEYS: a block is rows of one page. One thread
  // asks; keys past the item's end come along and are made harmless by the scores warpgroup.
  MLA_DEVICE void boxes() {
    if (thread_ != 0) return;
    const uint32_t stage = shared_ + ring_.stage * Policy::STAGE_BYTES;
    const uint32_t full = barriers_.kv_full(ring_.stage);
    const int in_table = first_ / params_.page;
    const int row = first_ - in_table * params_.page;
    const int number = __ldg(pages_ + in_table);
    const int begin = side_ == 0 ? 0 : 4;
    const int end = side_ == 0 ? 4 : Policy::COLUMN_BLOCKS;
    barrier_expect(full, (end - begin) * Policy::BLOCK_BYTES);
    for (int c = begin; c < end; ++c)
      copy_box(stage + c * Policy::BLOCK_BYTES, &params_.kv_map_0, c * 64, row, number, full);
  }

  // The next item that has keys.
  MLA_DEVICE bool next_item() {
    Item item;
    while (work_.next(item)) {
      if (item.keys() == 0) continue;
      first_ = item.first;
      end_ = item.end;
      pages_ = params_.block_table != nullptr ? params_.block_table + item.sequence * params_.block_table_stride
                                              : params_.kv_indices + __ldg(params_.kv_indptr + item.sequence);
      return true;
    }
    return false;
  }

  const DecodeParams& params_;
  Barriers<Policy> barriers_;
  WorkList work_;
  Ring<Policy::STAGES> ring_;
  uint32_t shared_;
  int side_;
  int thread_;
  bool more_;
  int first_;
  int end_;
  const int32_t* pages_;
};

}  // namespace mla::sm90
