// The launch parameters of convert_kv: two caches, and the slots of the tokens that are copied from one to the other.
#pragma once

#include "common/device.hpp"
#include "common/params/kv_place.hpp"

namespace mla {

struct ConvertKvParams {
  const uint8_t* source;             // [pages] blocks of place_0
  uint8_t* destination;              // [pages] blocks of place_1
  const void* source_slots;          // [tokens] int32, or int64 when wide_source
  const void* destination_slots;     // [tokens] int32, or int64 when wide_destination
  const float* source_descale;       // [1], or null: 1
  const float* destination_descale;  // [1], or null: 1
  KvPlace place[2];                  // of the source and of the destination
  int32_t tokens;                    // slots of either list
  int32_t wide_source;               // 1: source_slots is int64
  int32_t wide_destination;          // 1: destination_slots is int64
  int32_t parts;                     // of a row: those of 32 units, and what is left
  int32_t whole;                     // parts of 32 units
  int32_t rest;                      // units of a row behind them
  int32_t rest_tokens;               // tokens whose rest 32 lanes take
  int32_t few_bits;                  // 1: bf16 holds every value that is read
};

}  // namespace mla
