// Keys on their way to shared memory, run ahead of their use by the stages of the ring.
#pragma once

#include "sm_90/mbarrier.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/work.hpp"

namespace mla::sm90 {

// The work of this block: consecutive blocks take the row tiles of one worker.
template <class Policy>
MLA_DEVICE WorkList work_list(const Params& params) {
  const uint32_t tiles = params.row_tiles, worker = blockIdx.x / tiles;
  return WorkList(params, worker, (blockIdx.x - worker * tiles) * ROWS, Policy::GRANULE, Policy::KEYS);
}

constexpr int LOADER_BARRIER = 2;

// Walks the work list block of keys by block of keys, as far ahead as the ring of stages allows.
template <class Policy>
class Loader {
 protected:
  using Params = typename Policy::Params;

 public:
  MLA_DEVICE Loader(const Params& params, uint32_t shared)
      : params_(params), barriers_(shared), shared_(shared + Policy::KV_OFFSET) {}

  // Syncs with the block when it has looked up its first item.
  // With TMA one warp asks for keys and another for queries, so that the first keys do not wait behind 18 boxes of
  // queries. Without it every thread copies keys, and the first one asks for queries.
  MLA_DEVICE void run() {
    constexpr bool TMA = Policy::SOURCE == Source::tma;
    const int warp = uniform(group_thread() / 32);
    if (TMA && warp > 1) {
      block_sync();
      return;
    }
    WorkList work = work_list<Policy>(params_);
    block_sync();
    Item item;
    Ring<Policy::STAGES> ring;
    Ring<Policy::ITEMS> items;
    while (work.take(item)) {
      item.stop = 0;
      publish(item, items);
      if (item.keys() == 0) {
        work.look();
        continue;
      }
      // Neither may be a whole turn of the ring ahead: a barrier tells two phases apart, not three.
      if (TMA) asm volatile("bar.sync %0, 64;" ::"n"(LOADER_BARRIER) : "memory");
      if (!TMA || warp == 1) {
        bring_q(item, ring);
      } else {
        ring.next();
        ring.next();
      }
      if (TMA && warp == 1) {
        for (int first = item.first; first < item.end; first += Policy::KEYS) ring.next();
        work.look();
        continue;
      }
      const int64_t first_page = params_.kv_indptr != nullptr ? __ldg(params_.kv_indptr + item.sequence)
                                                              : item.sequence * params_.page_ids_stride;
      const int32_t* pages = params_.page_ids + first_page;
      for (int first = item.first; first < item.end; first += Policy::KEYS) {
        if constexpr (TMA) boxes(pages, first, ring);
        else gather(pages, first, item.end, ring);
        ring.next();
        if (first == item.first) work.look();
      }
    }
    item.stop = 1;
    publish(item, items);
  }

 protected:
  // Tells the scores warpgroup the next item: they have no registers to walk the list themselves.
  MLA_DEVICE void publish(const Item& item, Ring<Policy::ITEMS>& items) {
    if (group_thread() == 0) {
      barrier_wait(barriers_.item_empty(items.stage), items.parity ^ 1);
      const uint32_t to = shared_ - Policy::KV_OFFSET + Policy::ITEM_OFFSET + items.stage * 32;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(item.sequence), "r"(item.length),
                   "r"(item.first), "r"(item.end)
                   : "memory");
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + 16), "r"(item.partial_row), "r"(item.stop) : "memory");
      barrier_arrive(barriers_.item_full(items.stage));
    }
    items.next();
    __syncwarp();
  }

  // An item's queries take two stages ahead of its keys, so that they too are there before they are needed: the first
  // half of every row, then the second. Rows past the sequence's last are the next one's, or zeros past the last of all:
  // their result is never stored.
  MLA_DEVICE void bring_q(const Item& item, Ring<Policy::STAGES>& ring) {
    const Queries queries(params_, item.sequence);
    const int first_row = blockIdx.x % params_.row_tiles * ROWS;
    constexpr int ASKER = Policy::SOURCE == Source::tma ? 1 : 0;
    const int lane = group_thread() - ASKER * 32;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t stage = shared_ + ring.stage * Policy::STAGE_BYTES;
      const uint32_t full = barriers_.kv_full(ring.stage);
      barrier_wait(barriers_.kv_empty(ring.stage), ring.parity ^ 1);
      if (lane == 0) barrier_expect(full, Policy::Q_BOXES * 64 * min(ROWS, params_.q_len * params_.heads));
      else if (Policy::SOURCE == Source::gather) barrier_arrive(full);
      if (lane == 0)
#pragma unroll 1
        for (int box = 0; box < Policy::Q_BOXES; ++box)
          copy_box(stage + box * Policy::Q_BOX_BYTES, &params_.q_map_0, half * (Policy::DEPTH / 2) + box * 32,
                   queries.first_token * params_.heads + first_row, full);
      ring.next();
    }
    __syncwarp();
  }

  // Any page size: every thread copies 16-byte pieces. A warp takes four keys of 128 contiguous bytes each, so memory is
  // read in whole lines, and the swizzle spreads its writes over all banks.
  MLA_DEVICE void gather(const int32_t* pages, int first, int end, const Ring<Policy::STAGES>& ring) {
    const int piece = group_thread() % 8;
    const int slot = group_thread() / 8;  // this thread's keys are slot, slot + 16, ...
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
                  2 * (number * params_.kv_page_stride + (key - in_table * params_.page) * Policy::DEPTH);
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

  // Pages that are multiples of KEYS, and items that begin at multiples of KEYS: a block is rows of one page. Keys past
  // the item's end come along and are made harmless by the scores warpgroup.
  MLA_DEVICE void boxes(const int32_t* pages, int first, const Ring<Policy::STAGES>& ring) {
    const int in_table = first / params_.page;
    const int row = first - in_table * params_.page;
    const int number = __ldg(pages + in_table);
    const uint32_t stage = shared_ + ring.stage * Policy::STAGE_BYTES;
    const uint32_t full = barriers_.kv_full(ring.stage);
    barrier_wait(barriers_.kv_empty(ring.stage), ring.parity ^ 1);
    if (group_thread() != 0) return;
    barrier_expect(full, Policy::STAGE_BYTES);
#pragma unroll
    for (int c = 0; c < Policy::COLUMN_BLOCKS; ++c)
      copy_box(stage + c * Policy::BLOCK_BYTES, &params_.kv_map_0, c * 64, row, number, full);
  }

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
};

}  // namespace mla::sm90
