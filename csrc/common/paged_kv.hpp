// Where the row of a key lies. A sequence owns a list of pages: a row of block_table, or the range of kv_indices that
// kv_indptr gives it. A contiguous cache is the case of one page per sequence; ragged token indices that of page 1.
#pragma once

#include "common/division.hpp"
#include "common/params/decode.hpp"
#include "common/read_constant.hpp"

namespace mla {

class PagedKv {
 public:
  MLA_DEVICE PagedKv(const DecodeParams& p, int element_bytes, int sequence)
      : cache_(static_cast<const char*>(p.kv_cache)),
        page_stride_(p.kv_page_stride * element_bytes),
        token_stride_(static_cast<uint32_t>(p.kv_token_stride * element_bytes)),
        page_(static_cast<uint32_t>(p.page)),
        page_reciprocal_(p.page_reciprocal),
        page_shift_(p.page_shift) {
    list_ = p.block_table ? p.block_table + sequence * p.block_table_stride
                          : p.kv_indices + read_constant(p.kv_indptr + sequence);
  }

  // Where the page number of a key stands; `key` must lie inside the sequence.
  MLA_DEVICE const int32_t* page_entry(uint32_t key) const { return list_ + entry(key); }
  MLA_DEVICE uint32_t page_of(uint32_t key) const { return static_cast<uint32_t>(*page_entry(key)); }

  // First byte of the row of `key`, which lies in page number `page`.
  MLA_DEVICE const char* row(uint32_t page, uint32_t key) const {
    const uint32_t in_page = key - entry(key) * page_;
    return cache_ + static_cast<int64_t>(page) * page_stride_ + static_cast<uint64_t>(in_page) * token_stride_;
  }

 private:
  // key / page
  MLA_DEVICE uint32_t entry(uint32_t key) const { return divided(key, page_reciprocal_, page_shift_); }

  const char* cache_;
  const int32_t* list_;
  int64_t page_stride_;    // bytes
  uint32_t token_stride_;  // bytes
  uint32_t page_;
  uint32_t page_reciprocal_;
  uint32_t page_shift_;
};

}  // namespace mla
