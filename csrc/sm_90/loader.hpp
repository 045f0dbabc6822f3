// Brings keys to shared memory, ahead of their use by up to the stages of the ring.
#pragma once

#include "sm_90/ahead.hpp"
#include "sm_90/mbarrier.hpp"
#include "sm_90/policy.hpp"
#include "sm_90/promise.hpp"
#include "sm_90/sides.hpp"
#include "sm_90/work.hpp"

namespace mla::sm90 {

// This block's work list: the grid is [workers][row tiles of 64].
template <class Policy>
MLA_DEVICE WorkList work_list(const Params& params) {
  return WorkList(params, blockIdx.y, first_row(), Policy::GRANULE, Policy::KEYS);
}

// What is told of an item besides itself: nothing, that its queries come even without keys, or that the list is over.
enum Told : int { WITH_QUERIES = 1, OVER = 2 };

// Walks the work list block of keys by block of keys, as far ahead as the ring of stages allows.
template <class Policy>
class Loader {
 protected:
  using Params = typename Policy::Params;
  // With TMA each of these has its own warp, so that none waits for another; else the first warp does
  // both besides copying keys.
  static constexpr bool TMA = Policy::SOURCE == Source::tma;
  static constexpr int Q_WARP = TMA ? 1 : 0;
  static constexpr int ITEM_WARP = TMA ? 2 : 0;
  static constexpr int AHEAD_WARP = 3;  // brings nothing by TMA

 public:
  MLA_DEVICE Loader(const Params& params, uint32_t shared)
      : params_(params), barriers_(shared), shared_(shared + Policy::KV_OFFSET) {}

  MLA_DEVICE void run() {
    const int warp = uniform(group_thread() / 32);
    if (warp == AHEAD_WARP) {
      const Ahead<Policy> ahead(params_);
      ahead.ask();
      if (params_.plan != nullptr) {
        take_turn();
        ahead.load();
      }
      if constexpr (Policy::AWAITABLE)
        if (Policy::awaited(params_)) Promise<Policy>(params_, shared_ - Policy::KV_OFFSET).make();
      if (TMA) return;
    }
    // Which sequence comes first follows from parameters alone, unless a plan or ragged queries decide it.
    const bool told = params_.plan != nullptr || params_.cu_seqlens_q != nullptr;
    if (told) turn();
    WorkList work = work_list<Policy>(params_);
    if (!told) turn();
    if (!TMA)
      copy_keys(work);
    else if (warp == Q_WARP)
      Policy::SIDES ? ask_for_queries_and_peer_keys(work) : ask_for_queries(work);
    else if (warp == ITEM_WARP)
      tell_items(work);
    else
      ask_for_keys(work);
    if constexpr (Policy::SIDES)
      if (warp == ITEM_WARP) send_probabilities<Policy>(shared_ - Policy::KV_OFFSET);
  }

 protected:
  // Where combine waits for words, whoever makes the promise lets it start.
  MLA_DEVICE void turn() const {
    wait_for_turn();
    if (!Policy::awaited(params_)) give_turn();
  }

  MLA_DEVICE void ask_for_keys(WorkList& work) {
    Ring<Policy::STAGES> ring;
    work.load_pages();
    const int32_t* pages = pages_of(work);
    work.measure();
    if (!work.more()) let_fill();
    for (bool begun = false; work.more(); begun = true) {
      if (begun) meet();
      const Item item = work.item();
      if (!begun || item.keys() != 0) {  // two stages of queries
        ring.next();
        ring.next();
      }
      for (int first = item.first; first < item.end; first += Policy::KEYS) {
        boxes<Policy::STAGE_BYTES>(pages, first, 0, stage(ring));
        ring.next();
        if (first == item.first) go_on(work);
      }
      if (item.keys() == 0) go_on(work);
      pages = pages_of(work);
    }
  }

  // Once an item's first keys are asked for.
  MLA_DEVICE void go_on(WorkList& work) const {
    let_fill();
    look_up(work);
  }

  // Where combine waits for words, a block has one item.
  MLA_DEVICE void let_fill() const {
    if constexpr (Policy::AWAITABLE)
      if (Policy::awaited(params_)) asm volatile("bar.arrive %0, 64;" ::"n"(FILL_BARRIER) : "memory");
  }

  // A block's first queries do not wait for the sequence's length, so they come even if it has no keys.
  MLA_DEVICE void ask_for_queries(WorkList& work) {
    if (!work.more()) return;
    Ring<Policy::STAGES> ring;
    bring_q(work.item().sequence, ring);
    work.measure();
    for (;;) {
      for (int first = work.item().first; first < work.item().end; first += Policy::KEYS) ring.next();
      look_up(work);
      if (!work.more()) return;
      meet();
      if (work.item().keys() != 0) bring_q(work.item().sequence, ring);
    }
  }

  // A block that has one side of two cuts has one item, or none. Of the other cut's keys it needs these columns.
  MLA_DEVICE void ask_for_queries_and_peer_keys(WorkList& work) {
    if (!work.more()) return;
    Ring<Policy::STAGES> stages;
    const int sequence = work.item().sequence;
    bring_q(sequence, stages);
    const int32_t* pages = pages_of(work);
    work.measure();
    const int number = (static_cast<int>(blockIdx.y) - sequence * params_.num_splits) ^ 1;
    const EqualCut cut(params_, number, work.item().length, Policy::KEYS);
    Ring<Policy::PEER_STAGES> ring;
    for (int first = cut.first; first < cut.end; first += Policy::KEYS) {
      const int side = static_cast<int>(cluster_rank()) * (VALUE_COLUMNS / 64);
      const Stage to{shared_ + Policy::PEER_OFFSET + ring.stage * Policy::PEER_STAGE_BYTES,
                     barriers_.peer_full(ring.stage), barriers_.peer_empty(ring.stage), ring.parity};
      boxes<Policy::PEER_STAGE_BYTES>(pages, first, side, to);
      ring.next();
    }
  }

  // Called by both warps that ask for boxes, at every item but the first: neither may get a whole turn of the ring
  // ahead, because a barrier distinguishes two phases, not three.
  MLA_DEVICE void meet() { asm volatile("bar.sync %0, 64;" ::"n"(LOADER_BARRIER) : "memory"); }

  MLA_DEVICE void tell_items(WorkList& work) {
    Ring<Policy::ITEMS> items;
    work.measure();
    for (int what = WITH_QUERIES; work.more(); what = 0) {
      publish(work.item(), what, items);
      look_up(work);
    }
    publish(work.item(), OVER, items);
  }

  MLA_DEVICE void copy_keys(WorkList& work) {
    Ring<Policy::STAGES> ring;
    Ring<Policy::ITEMS> items;
    work.load_pages();
    work.measure();
    while (work.more()) {
      const Item item = work.item();
      publish(item, 0, items);
      if (item.keys() != 0) bring_q(item.sequence, ring);
      const int32_t* pages = pages_of(work);
      for (int first = item.first; first < item.end; first += Policy::KEYS) {
        gather(pages, first, item.end, ring);
        ring.next();
        if (first == item.first) look_up(work);
      }
      if (item.keys() == 0) look_up(work);
    }
    publish(work.item(), OVER, items);
  }

  MLA_DEVICE static void look_up(WorkList& work) {
    work.find();
    work.measure();
  }

  // The page table of the item's sequence; null at the end of the list.
  MLA_DEVICE const int32_t* pages_of(const WorkList& work) const {
    if (!work.more()) return nullptr;
    const int sequence = work.item().sequence;
    return params_.page_ids + (params_.kv_indptr != nullptr ? load_word(params_.kv_indptr + sequence)
                                                            : sequence * params_.page_ids_stride);
  }

  // Tells the scores warpgroup the next item, and `what` of it: it has no registers to walk the list itself.
  MLA_DEVICE void publish(const Item& item, int what, Ring<Policy::ITEMS>& items) {
    if (group_thread() == ITEM_WARP * 32) {
      barrier_wait(barriers_.item_empty(items.stage), items.parity ^ 1);
      const uint32_t to = shared_ - Policy::KV_OFFSET + Policy::ITEM_OFFSET + items.stage * 32;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(item.sequence), "r"(item.length),
                   "r"(item.first), "r"(item.end)
                   : "memory");
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + 16), "r"(item.partial_row), "r"(what) : "memory");
      barrier_arrive(barriers_.item_full(items.stage));
    }
    items.next();
    __syncwarp();
  }

  // One half of the queries of a block's rows, which begin at `row` of all, to the ring's stage; called by one thread.
  MLA_DEVICE void ask_for_half(int row, int half, const Ring<Policy::STAGES>& ring) const {
    const uint32_t full = barriers_.kv_full(ring.stage);
    const uint32_t to = shared_ + ring.stage * Policy::STAGE_BYTES;
    barrier_expect(full, Policy::Q_BOXES * Policy::q_box_bytes(params_));
    if constexpr (!Policy::TWO_CUTS)
      copy_box(to, &params_.q_map_0, 0, row, half * Policy::Q_BOXES, full);
    else if (half == static_cast<int>(cluster_rank()))  // two cuts have the same queries, and a block's only ones
      copy_box_to_both(to, &params_.q_map_0, 0, row, half * Policy::Q_BOXES, full);
  }

  MLA_DEVICE void wait_for_empty(const Ring<Policy::STAGES>& ring) const {
    barrier_wait(barriers_.kv_empty(ring.stage), ring.parity ^ 1);
  }

  // A stage of a ring of keys: where it is, the barriers that say when it is full and empty, and the phase of these.
  struct Stage {
    uint32_t at;
    uint32_t full;
    uint32_t empty;
    uint32_t parity;
  };
  MLA_DEVICE Stage stage(const Ring<Policy::STAGES>& ring) const {
    return {shared_ + ring.stage * Policy::STAGE_BYTES, barriers_.kv_full(ring.stage), barriers_.kv_empty(ring.stage),
            ring.parity};
  }

  // For whoever asks the copy engine: the stage may have held results, written by ordinary stores. The warps that
  // stored them do not fence, because the fence would wait for results on their way to memory.
  MLA_DEVICE static void wait_for_stage(const Stage& stage) {
    barrier_wait(stage.empty, stage.parity ^ 1);
    fence_async();
  }

  // An item's queries take the two stages before its keys, so that they too arrive before they are needed: first one
  // half of every row, then the other. Rows past the sequence's last belong to the next sequence, or are zeros past the
  // very last; their results are never stored.
  MLA_DEVICE void bring_q(int sequence, Ring<Policy::STAGES>& ring) {
    const Queries queries(params_, sequence);
    const int row = static_cast<int>(queries.first_token * params_.heads) + first_row();
    const int lane = group_thread() - Q_WARP * 32;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      wait_for_stage(stage(ring));
      if (lane == 0)
        ask_for_half(row, half, ring);
      else if (Policy::SOURCE == Source::gather)
        barrier_arrive(barriers_.kv_full(ring.stage));
      ring.next();
    }
    __syncwarp();
  }

  // For any page size: every thread copies 16-byte pieces. A warp copies 128 contiguous bytes of each of four keys, so
  // memory is read in whole lines, and the swizzle spreads its writes over all banks.
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
        const int in_table = page_of(key);
        const int64_t number = __ldg(pages + in_table);
        from[i] = cache + piece * 16 +
                  2 * (number * params_.kv_page_stride + (key - in_table * params_.page) * Policy::DEPTH);
      }
    }
    const uint32_t to = shared_ + ring.stage * Policy::STAGE_BYTES + slot * 128 + ((piece ^ (slot & 7)) << 4);
    wait_for_empty(ring);
#pragma unroll
    for (int i = 0; i < Policy::KEYS / 16; ++i) {
      const bool valid = from[i] != nullptr;
      const char* row = valid ? from[i] : cache;  // nothing is read when not valid
#pragma unroll
      for (int c = 0; c < Policy::COLUMN_BLOCKS; ++c)
        copy16(to + c * Policy::BLOCK_BYTES + i * 2048, row + c * 128, valid);
    }
    copies_arrive(barriers_.kv_full(ring.stage));
  }

  // For pages that are multiples of KEYS, and items that begin at multiples of KEYS: a stage is rows of one page,
  // [column blocks from `block` on][KEYS][64]. Keys past the item's end come along; the scores warpgroup makes them
  // harmless. L2 is to keep partial results rather than keys: those are read next, the keys not before the next step.
  template <int BYTES>
  MLA_DEVICE void boxes(const int32_t* pages, int first, int block, const Stage& to) {
    const uint64_t keep = params_.partial_out != nullptr ? EVICT_FIRST : EVICT_NORMAL;
    const int in_table = page_of(first);
    const int row = first - in_table * params_.page;
    const int number = __ldg(pages + in_table);
    wait_for_stage(to);
    if (group_thread() % 32 != 0) return;
    barrier_expect(to.full, BYTES);
#pragma unroll 1
    for (int at = 0; at < BYTES; at += Policy::BOX_BLOCKS * Policy::BLOCK_BYTES, block += Policy::BOX_BLOCKS)
      copy_box(to.at + at, &params_.kv_map_0, 0, row, block, number, to.full, keep);
  }

  MLA_DEVICE int page_of(int key) const { return divided(key, params_.page_magic, params_.page_shift); }

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
};

}  // namespace mla::sm90
