// append_kv: rotates, quantises and writes new tokens into a paged cache of any layout. One pipeline for every arch.
//
// A workgroup writes one token. Its waves first look for a later token with the same slot, which would be the one that
// stays; then each takes pieces of the row: up to 128 latent values, or those of one scale, or the rope part.
#pragma once

#include "mla/encode.hpp"
#include "mla/params/append_kv.hpp"

namespace mla {

template <class Wave>
struct AppendKv {
  static constexpr int waves = 8;  // the most pieces a row of today's layouts has: 7 tiles and the rope part
  static constexpr int threads = waves * Wave::lanes;
  static constexpr int min_waves = 4;
  static constexpr int piece = 128;  // values; no layout has a longer tile
  static constexpr int per_lane = piece / Wave::lanes;

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

  MLA_DEVICE static void run(const AppendKvParams& p) {
    Wave::wait_for_producer();
    Wave::release_consumer();
    const int token = block_id_x();
    const int64_t slot = index_at(p.slot_mapping, p.wide_slots, token);
    const bool wanted = slot >= 0 && slot < p.slots;
    if (written_later(p, token, wanted ? slot : -1) || !wanted) return;
    const uint64_t scaled = static_cast<uint64_t>(slot) * p.page_reciprocal;
    const uint32_t block = static_cast<uint32_t>(scaled >> (31 + p.page_shift));
    const Record record{p.kv_cache + block * p.block_bytes, static_cast<int>(slot) - static_cast<int>(block) * p.page,
                        p.page};

    const int wave = Wave::uniform(thread_id() / Wave::lanes);
    const int lane = thread_id() % Wave::lanes;
    const int length = p.tile > 0 ? p.tile : piece;
    const int pieces = (p.latent + length - 1) / length;
    for (int i = wave; i <= pieces; i += waves) {
      if (i < pieces) write_latent(p, record, token, i, length, lane);
      else write_rest(p, record, token, lane);
    }
  }

  // Whether a token after this one has the slot. All threads of the workgroup get the same answer.
  MLA_DEVICE static bool written_later(const AppendKvParams& p, int token, int64_t slot) {
    MLA_SHARED int found[waves];
    const int thread = thread_id();
    bool mine = false;
    for (int other = token + 1 + thread; slot >= 0 && other < p.tokens; other += threads)
      mine = mine || index_at(p.slot_mapping, p.wide_slots, other) == slot;
    const bool any = Wave::any(mine);
    if (thread % Wave::lanes == 0) found[thread / Wave::lanes] = any;
    block_sync();
    int all = 0;
    for (int w = 0; w < waves; ++w) all |= found[w];
    return all != 0;
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
