// append_kv: rotates, quantises and writes new tokens into a paged cache of any layout. One pipeline for every arch.
//
// A workgroup writes one token, or several neighbours with a share of its waves each. First all look together for later
// tokens with the same slots, which would be the ones that stay: with several tokens the slots are read once for all of
// them. Then each wave takes pieces of a row: up to 128 latent values, or those of one scale, or the rope part.
#pragma once

#include "mla/encode.hpp"
#include "mla/params/append_kv.hpp"

namespace mla {

template <class Wave, int tokens_>
struct AppendKv {
  static constexpr int waves = 8;  // the most pieces a row of today's layouts has: 7 tiles and the rope part
  static constexpr int waves_per_token = waves / tokens_;
  static constexpr int threads = waves * Wave::lanes;
  static constexpr int min_waves = 4;
  static constexpr int piece = 128;  // values; no layout has a longer tile
  static constexpr int per_lane = piece / Wave::lanes;
  static_assert(waves % tokens_ == 0, "append_kv: TOKENS must divide the waves of a workgroup");

  // Where the token lies in the cache.
  struct Record {
    uint8_t* block;
    int token;
    int page;

    MLA_DEVICE uint8_t* field(int per_block, int stride, int offset) const {
      return block + (static_cast<int64_t>(page) * per_block + static_cast<int64_t>(token) * stride + offset);
    }
  };

  // The bits of a result that may be NaN, which builds with -fno-honor-nans may assume it is not.
  MLA_DEVICE static uint32_t bits_of(float x) { return bit_cast<uint32_t>(Wave::opaque(x)); }

  MLA_DEVICE static int64_t index_at(const void* array, int wide, int64_t at) {
    return wide != 0 ? static_cast<const int64_t*>(array)[at] : static_cast<const int32_t*>(array)[at];
  }

  // The token's slot, or -1 where nothing is to be written.
  MLA_DEVICE static int slot_of(const AppendKvParams& p, int token) {
    if (token >= p.tokens) return -1;
    const int64_t slot = index_at(p.slot_mapping, p.wide_slots, token);
    return slot >= 0 && slot < p.slots ? static_cast<int>(slot) : -1;
  }

  MLA_DEVICE static void run(const AppendKvParams& p) {
    Wave::wait_for_producer();
    Wave::release_consumer();
    const int wave = Wave::uniform(thread_id() / Wave::lanes);
    const int lane = thread_id() % Wave::lanes;
    const int own = wave / waves_per_token;
    const int first = block_id_x() * tokens_;
    const int token = first + own;
    const int slot = slot_of(p, token);
    if ((written_later(p, first) >> own & 1) != 0 || slot < 0) return;
    const uint64_t scaled = static_cast<uint64_t>(slot) * p.page_reciprocal;
    const uint32_t block = static_cast<uint32_t>(scaled >> (31 + p.page_shift));
    const Record record{p.kv_cache + block * p.block_bytes, slot - static_cast<int>(block) * p.page, p.page};
    const int length = p.tile > 0 ? p.tile : piece;
    const int pieces = (p.latent + length - 1) / length;
    for (int i = wave % waves_per_token; i <= pieces; i += waves_per_token) {
      if (i < pieces) write_latent(Wave::again(p), record, token, i, length, lane);
      else write_rest(Wave::again(p), record, token, lane);
    }
  }

  // Bit t: whether a token after first + t has its slot. All threads of the workgroup get the same answer.
  MLA_DEVICE static int written_later(const AppendKvParams& p, int first) {
    MLA_SHARED int found[waves];
    const int thread = thread_id();
    int slots[tokens_];
    for (int t = 0; t < tokens_; ++t) slots[t] = slot_of(p, first + t);
    int mine = 0;
    for (int other = first + 1 + thread; other < p.tokens; other += threads) {
      const int64_t slot = index_at(p.slot_mapping, p.wide_slots, other);
      for (int t = 0; t < tokens_; ++t) mine |= slot == slots[t] && slot >= 0 && other > first + t ? 1 << t : 0;
    }
    int any = 0;
    for (int t = 0; t < tokens_; ++t) any |= Wave::any((mine >> t & 1) != 0) ? 1 << t : 0;
    if (thread % Wave::lanes == 0) found[thread / Wave::lanes] = any;
    block_sync();
    int all = 0;
    for (int w = 0; w < waves; ++w) all |= found[w];
    return all;
  }

  MLA_DEVICE static void write_latent(const AppendKvParams& p, const Record& record, int token, int number, int length,
                                      int lane) {
    const int first = number * length;
    const int count = p.latent - first < length ? p.latent - first : length;
    float values[per_lane];
    for (int i = 0; i < per_lane; ++i) {
      const int column = lane + i * Wave::lanes;
      values[i] = 0.0f;
      if (column < count) values[i] = load_as_float<Wave>(p.kv_c, p.in_type, token * p.kv_c_stride + first + column);
    }
    if (p.tile > 0) {
      const float scale = Wave::opaque(scale_of(p, values, lane));
      uint8_t* scales = record.field(p.scale_per_block, p.scale_stride, p.scale_offset);
      if (lane == 0) store_encoded<Wave>(scales, number, p.scale_encoding, bit_cast<uint32_t>(scale));
      for (int i = 0; i < per_lane; ++i) values[i] = values[i] / scale;
    } else if (p.kv_descale != nullptr) {
      for (int i = 0; i < per_lane; ++i) values[i] = values[i] / *p.kv_descale;
    }
    uint8_t* latents = record.field(p.latent_per_block, p.latent_stride, p.latent_offset);
    for (int i = 0; i < per_lane; ++i) {
      const int column = lane + i * Wave::lanes;
      if (column < count) store_encoded<Wave>(latents, first + column, p.latent_encoding, bits_of(values[i]));
    }
  }

  // The scale of a tile: NaN if it holds NaN or infinity. Magnitudes as integers are in order and NaN is the largest.
  MLA_DEVICE static float scale_of(const AppendKvParams& p, const float (&values)[per_lane], int lane) {
    int largest = 0;
    for (int i = 0; i < per_lane; ++i) {
      const int size = static_cast<int>(bits_of(values[i]) & 0x7fffffff);
      largest = size > largest ? size : largest;
    }
    largest = Wave::template max_over<Wave::lanes>(largest, lane);
    const int ratio = bit_cast<int>(bit_cast<float>(largest) / p.divisor);  // positive, so ordered as an integer
    const int smallest = bit_cast<int>(p.smallest);
    int bits = ratio > smallest ? ratio : smallest;
    if (p.power_of_two != 0) bits = (bits + 0x7fffff) & 0x7f800000;  // the next power of two unless it is one
    return bit_cast<float>(largest < 0x7f800000 ? bits : 0x7fc00000);
  }

  // The rope part, then the padding of the record.
  MLA_DEVICE static void write_rest(const AppendKvParams& p, const Record& record, int token, int lane) {
    uint8_t* ropes = record.field(p.rope_per_block, p.rope_stride, p.rope_offset);
    const int64_t row = token * p.k_pe_stride;
    if (p.cos_sin == nullptr) {
      for (int column = lane; column < p.rope; column += Wave::lanes)
        write_rope(p, ropes, column, load_as_float<Wave>(p.k_pe, p.in_type, row + column));
    } else {
      const int half = p.rope / 2;
      const int64_t angles = index_at(p.positions, p.wide_positions, token) * p.cos_sin_stride;
      for (int pair = lane; pair < half; pair += Wave::lanes) {
        const int low = p.interleaved != 0 ? 2 * pair : pair;
        const int high = p.interleaved != 0 ? low + 1 : low + half;
        const float a = load_as_float<Wave>(p.k_pe, p.in_type, row + low);
        const float b = load_as_float<Wave>(p.k_pe, p.in_type, row + high);
        const float cos = load_as_float<Wave>(p.cos_sin, p.angle_type, angles + pair);
        const float sin = load_as_float<Wave>(p.cos_sin, p.angle_type, angles + half + pair);
        // Two roundings each, as the definition has them: a fused operation would round once.
        write_rope(p, ropes, low, Wave::difference(Wave::product(a, cos), Wave::product(b, sin)));
        write_rope(p, ropes, high, Wave::difference(Wave::product(b, cos), -Wave::product(a, sin)));
      }
    }
    uint8_t* pads = record.field(p.pad_per_block, p.pad_stride, p.pad_offset);
    for (int byte = lane; byte < p.pad; byte += Wave::lanes) pads[byte] = 0;
  }

  MLA_DEVICE static void write_rope(const AppendKvParams& p, uint8_t* ropes, int column, float value) {
    if (p.kv_descale != nullptr) value = value / *p.kv_descale;
    store_encoded<Wave>(ropes, column, p.rope_encoding, bits_of(value));
  }
};

}  // namespace mla
