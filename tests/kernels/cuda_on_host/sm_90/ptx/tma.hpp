// Copies on a CPU of 16-bit rows: boxes of queries and of keys, bulk copies, and 16 bytes at a time by the threads
// (cp_async.hpp). They arrive when the block's scheduler lets them.
#pragma once

#include "sm_90/ptx/mbarrier.hpp"
#include "sm_90/ptx/memory.hpp"

namespace mla::sm_90 {

constexpr uint64_t EVICT_NORMAL = 0, EVICT_FIRST = 1;

struct Piece {
  uint32_t to;       // as `of_cluster` has it, since no block runs when it lands
  const void* from;  // null: zeros
  int bytes;
  uint32_t word = 0;    // of four bytes, in place of zeros
  uint32_t shared = 0;  // or else the shared memory that is copied, as `of_cluster` has it

  void land() const {
    if (shared != 0)
      std::memcpy(shared_at(to, 16), shared_at(shared, 16), bytes);
    else if (from == nullptr && bytes == 4)
      std::memcpy(shared_at(to, 4), &word, 4);
    else if (from == nullptr)
      std::memset(shared_at(to, min(bytes, 16)), 0, bytes);
    else
      std::memcpy(shared_at(to, min(bytes, 16)), from, bytes);
  }
};

// Pieces that arrive together, and what arrives with them.
struct BulkCopy {
  std::vector<Piece> pieces;
  uint32_t barrier;
  int transactions;  // bytes to count, or 0: one arrival
  long earliest = -1;  // the scheduler's round before which it does not land; negative until that is drawn

  void land() const {
    for (const Piece& piece : pieces) piece.land();
    if (transactions == 0) return settle_arrival(mbarrier_at(barrier), barrier);
    mbarrier_at(barrier).bytes -= transactions;
    mbarrier_at(barrier).settle();
  }
};
inline std::vector<BulkCopy> bulk_copies;

// Stands where a launch has the tensor map of queries, or of one of their parts: values of heads and tokens, in boxes of
// 32 columns. Where they are a matrix of rows, all rows are heads of one token.
struct QueryMap {
  const uint16_t* values;
  int64_t heads, head_stride;
  int64_t tokens, token_stride;
  int64_t width;
  int64_t box_heads, box_tokens;
  int64_t boxes;  // of one load
};

// Boxes of [box_tokens][box_heads][64 bytes] in the 64-byte swizzle; zeros stand for heads, tokens and columns behind the
// last.
inline void tma_load(uint32_t to, const void* map, int, int head, int token, int box, uint32_t barrier) {
  const QueryMap& queries = *static_cast<const QueryMap*>(map);
  const int64_t rows = queries.box_heads * queries.box_tokens;
  BulkCopy copy{{}, of_cluster(barrier), static_cast<int>(queries.boxes * rows * 64)};
  for (int64_t b = 0; b < queries.boxes; ++b)
    for (int64_t r = 0; r < rows; ++r)
      for (int piece = 0; piece < 4; ++piece) {
        const uint32_t at = to + (b * rows + r) * 64 + piece * 16;
        const int64_t h = head + r % queries.box_heads, t = token + r / queries.box_heads;
        const bool there = h < queries.heads && t < queries.tokens && (box + b) * 32 < queries.width;
        const uint16_t* from =
            queries.values + h * queries.head_stride + t * queries.token_stride + (box + b) * 32 + piece * 8;
        copy.pieces.push_back({of_cluster(at ^ (at >> 7 & 3) << 4), there ? from : nullptr, 16});
      }
  bulk_copies.push_back(copy);
}
inline void tma_prefetch_descriptor(const void*) {}

// Stands where a launch has the tensor map of the cache: pages of rows, in boxes of 64 columns of `box_rows` of them.
struct KeyMap {
  const uint8_t* values;
  int64_t value_bytes;  // 2, or 1 of e4m3
  int64_t rows;         // of a page
  int64_t width;
  int64_t page_stride;
  int64_t box_rows;
  int64_t boxes;  // of one load
};

// Boxes of [box_rows][128 or 64 bytes] in the swizzle of that width; rows behind the page's last are zeros, and so is what
// is right of them.
inline void tma_load(uint32_t to, const void* map, int column, int row, int box, int page, uint32_t barrier, uint64_t) {
  const KeyMap& keys = *static_cast<const KeyMap*>(map);
  const int64_t bytes = 64 * keys.value_bytes, values = 16 / keys.value_bytes;
  BulkCopy copy{{}, of_cluster(barrier), static_cast<int>(keys.boxes * keys.box_rows * bytes)};
  for (int64_t b = 0; b < keys.boxes; ++b)
    for (int64_t r = 0; r < keys.box_rows; ++r)
      for (int piece = 0; piece < bytes / 16; ++piece) {
        const uint32_t at = to + (b * keys.box_rows + r) * bytes + piece * 16;
        const int64_t first = column + (box + b) * 64 + piece * values;
        const uint8_t* from =
            keys.values + (page * keys.page_stride + (row + r) * keys.width + first) * keys.value_bytes;
        copy.pieces.push_back({of_cluster(at ^ (at >> 7 & (bytes / 16 - 1)) << 4), row + r < keys.rows && first < keys.width ? from : nullptr, 16});
      }
  bulk_copies.push_back(copy);
}

inline void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0 || to + bytes > SHARED_BYTES)
    fail("no such copy to", to);
  bulk_copies.push_back({{{of_cluster(to), from, bytes}}, of_cluster(barrier), bytes});
}

// The same box to both blocks of a cluster of two, where it arrives at times of its own, each on its own mbarrier.
inline void tma_load_multicast(uint32_t to, const void* map, int x, int y, int z, int w, uint32_t barrier) {
  if (CLUSTER_BLOCKS != 2) fail("no cluster of two", 0);
  for (int block = 0; block < 2; ++block) tma_load(in_block(block, to), map, x, y, z, w, in_block(block, barrier));
}
inline void tma_load_multicast(uint32_t to, const void* map, int x, int y, int z, int w, uint32_t barrier,
                               uint64_t hint) {
  if (CLUSTER_BLOCKS != 2) fail("no cluster of two", 0);
  for (int block = 0; block < 2; ++block) tma_load(in_block(block, to), map, x, y, z, w, in_block(block, barrier), hint);
}

// Called by roles of other kernels.
inline void tma_prefetch(const void*, int, int, int, int) {}
inline void bulk_prefetch(const void*, int) {}
template <int PENDING>
void bulk_store(void*, uint32_t, int) {
  fail("no streaming combine", 0);
}
inline void bulk_store_wait() { fail("no streaming combine", 0); }

}  // namespace mla::sm_90
