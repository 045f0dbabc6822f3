// One token's row for append_kv, for calls whose rows are regular: 16-bit inputs, and up to 512 latent values in
// octets, eight neighbouring values that begin at a multiple of 16 bytes. A wave holds the row in registers. It issues
// all loads of the row together, before the token's slot need be known, and a lane writes an octet at a time. Where the
// row is one run of values that are scaled alike (`one_run`), rope values are octets too, and an octet is rotated by the
// lane that has it.
#pragma once

#include "common/encode.hpp"
#include "common/params/append_kv.hpp"

namespace mla {

// The bits of a result that may be NaN, which builds with -fno-honor-nans may assume it is not.
template <class Wave>
MLA_DEVICE uint32_t bits_of(float x) { return bit_cast<uint32_t>(Wave::opaque(x)); }

// The scale of a tile whose largest magnitude has these bits: NaN if it is NaN or infinity. Magnitudes as integers are
// in order and NaN is the largest.
template <class Wave, bool may_be_e4m3 = false>
MLA_DEVICE float tile_scale(const AppendKvParams& p, int largest) {
  const int ratio = bit_cast<int>(bit_cast<float>(largest) / p.divisor);  // positive, so ordered as an integer
  const int smallest = bit_cast<int>(p.smallest);
  int bits = ratio > smallest ? ratio : smallest;
  if (p.power_of_two != 0) bits = (bits + 0x7fffff) & 0x7f800000;  // the next power of two unless it is one
  if (may_be_e4m3 && p.scale_encoding == ENCODED_E4M3FN)
    bits = static_cast<int>(rounded_to_e4m3(static_cast<uint32_t>(bits)));
  return Wave::opaque(bit_cast<float>(largest < 0x7f800000 ? bits : 0x7fc00000));
}

MLA_DEVICE int64_t index_at(const void* array, int wide, int64_t at) {
  return wide != 0 ? static_cast<const int64_t*>(array)[at] : static_cast<const int32_t*>(array)[at];
}

// Where a token lies in the cache.
struct Record {
  uint8_t* block;
  int token;
  int page;

  MLA_DEVICE uint8_t* field(int per_block, int stride, int offset) const {
    return block + (static_cast<int64_t>(page) * per_block + static_cast<int64_t>(token) * stride + offset);
  }
};

template <class Wave, bool one_run>
struct AppendRow {
  static constexpr int most_latent = 512;
  static constexpr int octets = most_latent / 8 / Wave::lanes;  // of a lane

  using Octet = Vec<uint32_t, 4>;

  Octet latent[octets];
  uint32_t low, high;                // a pair of rope values
  uint32_t position, position_high;  // words as they lie in memory: to widen them where they are loaded would wait

  // Cosine and sine of a lane's pair.
  struct Angle {
    uint32_t cos, sin;
  };

  // Whether the rows of this call are regular in this sense.
  MLA_DEVICE static bool fits(const AppendKvParams& p) {
    const bool sizes = one_run ? has_run_sizes(p)
                               : p.in_type != ENCODED_FP32 && p.latent % 8 == 0 && p.latent <= most_latent &&
                                     p.rope % 2 == 0 && p.rope <= 2 * Wave::lanes &&
                                     (p.tile == 0 || p.tile == 64 || p.tile == 128);
    const uint64_t latent_octet = reinterpret_cast<uint64_t>(p.kv_c) | static_cast<uint64_t>(p.kv_c_stride) * 2;
    const uint64_t rope_octet = reinterpret_cast<uint64_t>(p.k_pe) | static_cast<uint64_t>(p.k_pe_stride) * 2;
    const uint64_t octet = one_run ? latent_octet | rope_octet : latent_octet;
    const uint64_t block = reinterpret_cast<uint64_t>(p.kv_cache) | static_cast<uint64_t>(p.block_bytes);
    const uint64_t latents = block | static_cast<uint64_t>(p.latent_offset | p.latent_stride | p.latent_per_block);
    const uint64_t ropes = block | static_cast<uint64_t>(p.rope_offset | p.rope_stride | p.rope_per_block);
    // Bytes of an octet's store, less one.
    const uint64_t whole = one_run && p.latent_encoding == ENCODED_E2M1 ? 3 : is_e4m3(p.latent_encoding) ? 7 : 15;
    return sizes && (octet & 15) == 0 && (latents & whole) == 0 && (ropes & 3) == 0;
  }

  // Rotation takes whole octets, and either half of the rope part is some.
  MLA_DEVICE static bool has_run_sizes(const AppendKvParams& p) {
    const bool tiles = p.tile == 16 || p.tile == 32 || p.tile == 64 || p.tile == 128;
    return tiles && p.in_type != ENCODED_FP32 && p.latent % 8 == 0 && p.rope % 16 == 0 && length(p) <= most_latent;
  }

  // Values in octets.
  MLA_DEVICE static int length(const AppendKvParams& p) { return one_run ? p.latent + p.rope : p.latent; }
  MLA_DEVICE static bool is_e4m3(int encoding) { return encoding == ENCODED_E4M3FN || encoding == ENCODED_E4M3FNUZ; }
  // Which values of the rope part a lane's pair are. Without rotation any will do.
  MLA_DEVICE static bool neighbours(const AppendKvParams& p) { return p.cos_sin == nullptr || p.interleaved != 0; }
  MLA_DEVICE static int first_of(const AppendKvParams& p, int lane) { return neighbours(p) ? 2 * lane : lane; }
  MLA_DEVICE static int second_of(const AppendKvParams& p, int lane) {
    return neighbours(p) ? 2 * lane + 1 : lane + p.rope / 2;
  }

  MLA_DEVICE void load(const AppendKvParams& p, int token, int lane) {
    load_latent(p, token, lane);
    if constexpr (!one_run) load_rope(p, token, lane);
  }

  MLA_DEVICE void load_latent(const AppendKvParams& p, int token, int lane) {
    const uint16_t* row = static_cast<const uint16_t*>(p.kv_c) + token * p.kv_c_stride;
#pragma unroll
    for (int i = 0; i < octets; ++i) {
      latent[i] = Octet{{0, 0, 0, 0}};
      const int first = (lane + i * Wave::lanes) * 8;
      if (first < p.latent) latent[i] = *reinterpret_cast<const Octet*>(row + first);
      else if (one_run && first < length(p)) latent[i] = rope_octet(p, token, first - p.latent);
    }
  }

  MLA_DEVICE void load_rope(const AppendKvParams& p, int token, int lane) {
    const uint16_t* row = static_cast<const uint16_t*>(p.k_pe) + token * p.k_pe_stride;
    const int half = p.rope / 2;
    low = high = 0;
    position = position_high = 0;
    if (lane < half) {
      low = row[first_of(p, lane)];
      high = row[second_of(p, lane)];
    }
    if (p.cos_sin != nullptr) {
      const auto* words = static_cast<const uint32_t*>(p.positions) + (static_cast<int64_t>(token) << p.wide_positions);
      position = words[0];
      if (p.wide_positions != 0) position_high = words[1];
    }
  }

  // Loads cosine and sine of the lane's pair. Called for a token with a slot only: another's position may be anything.
  MLA_DEVICE Angle load_angle(const AppendKvParams& p, int lane) const {
    Angle angle{0, 0};
    if constexpr (one_run) return angle;
    const int half = p.rope / 2;
    if (p.cos_sin != nullptr && lane < half) {
      const int64_t wide = static_cast<int64_t>(static_cast<uint64_t>(position_high) << 32 | position);
      const int64_t at = (p.wide_positions != 0 ? wide : static_cast<int>(position)) * p.cos_sin_stride + lane;
      angle.cos = load_bits(p.cos_sin, p.angle_type, at);
      angle.sin = load_bits(p.cos_sin, p.angle_type, at + half);
    }
    return angle;
  }

  MLA_DEVICE void store_latent(const AppendKvParams& p, const Record& record, int token, int lane) const {
    uint8_t* latents = record.field(p.latent_per_block, p.latent_stride, p.latent_offset);
    const bool as_is = !one_run && p.latent_encoding == p.in_type && p.tile == 0 && p.kv_descale == nullptr;
#pragma unroll
    for (int i = 0; i < octets; ++i) {
      const int octet = lane + i * Wave::lanes;
      const bool exists = octet * 8 < length(p);
      if (as_is && !holds_nan(latent[i], p.in_type == ENCODED_BF16 ? 0x007f007f : 0x03ff03ff)) {
        if (exists) reinterpret_cast<Octet*>(latents)[octet] = latent[i];
      } else {
        store_converted(p, record, latents, latent[i], token, octet, exists, lane);
      }
    }
  }

  // Stores the rope part, then the padding of the record.
  MLA_DEVICE void store_rest(const AppendKvParams& p, const Record& record, const Angle& angle, int lane) const {
    const int half = one_run ? 0 : p.rope / 2;
    if (lane < half) {
      float a = value_of<Wave>(low, p.in_type), b = value_of<Wave>(high, p.in_type);
      if (p.cos_sin != nullptr)
        rotate<Wave>(a, b, value_of<Wave>(angle.cos, p.angle_type), value_of<Wave>(angle.sin, p.angle_type));
      if (p.kv_descale != nullptr) {
        a = a / *p.kv_descale;
        b = b / *p.kv_descale;
      }
      uint8_t* ropes = record.field(p.rope_per_block, p.rope_stride, p.rope_offset);
      const uint32_t a_bits = bits_of<Wave>(a), b_bits = bits_of<Wave>(b);
      if (neighbours(p) && p.rope_encoding == ENCODED_BF16) {
        reinterpret_cast<uint32_t*>(ropes)[lane] =
            encode<Wave, ENCODED_BF16>(a_bits) | encode<Wave, ENCODED_BF16>(b_bits) << 16;
      } else {
        store_encoded<Wave>(ropes, first_of(p, lane), p.rope_encoding, a_bits);
        store_encoded<Wave>(ropes, second_of(p, lane), p.rope_encoding, b_bits);
      }
    }
    uint8_t* pads = record.field(p.pad_per_block, p.pad_stride, p.pad_offset);
    for (int byte = lane; byte < p.pad; byte += Wave::lanes) pads[byte] = 0;
  }

 private:
  // Whether one of eight 16-bit values is NaN. `above`, added to the magnitudes in both halves of a word, takes
  // infinity to just below the sign bit, and a NaN into it.
  MLA_DEVICE static bool holds_nan(const Octet& words, uint32_t above) {
    uint32_t reached = 0;
    for (int i = 0; i < 4; ++i) reached |= (words[i] & 0x7fff7fff) + above;
    return (reached & 0x80008000) != 0;
  }

  // Eight rope values from `first` on.
  MLA_DEVICE static Octet rope_octet(const AppendKvParams& p, int token, int first) {
    return *reinterpret_cast<const Octet*>(static_cast<const uint16_t*>(p.k_pe) + token * p.k_pe_stride + first);
  }

  // Rotates eight rope values of a row of one run from `first` on. The others of their pairs are among them, or half a rope part away.
  MLA_DEVICE static void rotate_octet(const AppendKvParams& p, int token, int first, float (&values)[8]) {
    const int half = p.rope / 2;
    const int64_t angles = index_at(p.positions, p.wide_positions, token) * p.cos_sin_stride;
    if (p.interleaved != 0) {
      for (int i = 0; i < 8; i += 2)
        rotate_fused<Wave>(values[i], values[i + 1], angle_at(p, angles + first / 2 + i / 2),
                           angle_at(p, angles + half + first / 2 + i / 2));
    } else {
      float others[8];
      const bool is_first = first < half;
      unpack(p, rope_octet(p, token, is_first ? first + half : first - half), others);
      for (int i = 0; i < 8; ++i) {
        const int64_t at = angles + (is_first ? first : first - half) + i;
        float a = is_first ? values[i] : others[i], b = is_first ? others[i] : values[i];
        rotate_fused<Wave>(a, b, angle_at(p, at), angle_at(p, at + half));
        values[i] = is_first ? a : b;
      }
    }
    for (int i = 0; i < 8; ++i) values[i] = rounded_to<Wave>(values[i], p.in_type);
  }
  MLA_DEVICE static float angle_at(const AppendKvParams& p, int64_t at) {
    return value_of<Wave>(load_bits(p.cos_sin, p.angle_type, at), p.angle_type);
  }

  MLA_DEVICE static void store_converted(const AppendKvParams& p, const Record& record, uint8_t* latents,
                                         const Octet& words, int token, int octet, bool exists, int lane) {
    float values[8];
    unpack(p, words, values);
    if (one_run && p.cos_sin != nullptr && octet * 8 >= p.latent && exists)
      rotate_octet(Wave::reread(p), token, octet * 8 - p.latent, values);
    if (one_run || p.tile > 0) {
      const float scale = tile_scale<Wave, one_run>(p, largest_of_tile(p, values, lane));
      if (exists && octet * 8 % p.tile == 0) {
        uint8_t* scales = record.field(p.scale_per_block, p.scale_stride, p.scale_offset);
        const int number = number_of_tile(p, octet);
        store_encoded<Wave>(scales, number, p.scale_encoding, bit_cast<uint32_t>(scale));
      }
      for (int k = 0; k < 8; ++k) values[k] = values[k] / scale;
    } else if (p.kv_descale != nullptr) {
      for (int k = 0; k < 8; ++k) values[k] = values[k] / *p.kv_descale;
    }
    if (exists) store_octet(p, latents, octet, values);
  }

  MLA_DEVICE static void unpack(const AppendKvParams& p, const Octet& words, float (&values)[8]) {
    if (p.in_type == ENCODED_BF16) unpack<ENCODED_BF16>(words, values);
    else unpack<ENCODED_FP16>(words, values);
  }
  template <int encoding>
  MLA_DEVICE static void unpack(const Octet& words, float (&values)[8]) {
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = value_of<Wave>(words[i] & 0xffff, encoding);
      values[2 * i + 1] = value_of<Wave>(words[i] >> 16, encoding);
    }
  }

  MLA_DEVICE static int number_of_tile(const AppendKvParams& p, int octet) {
    if (one_run && p.tile < 64) return p.tile == 16 ? octet / 2 : octet / 4;
    return p.tile == 64 ? octet / 8 : octet / 16;
  }
  MLA_DEVICE static int largest_of_tile(const AppendKvParams& p, const float (&values)[8], int lane) {
    if (one_run && p.tile == 16) return largest<2>(values, lane);
    if (one_run && p.tile == 32) return largest<4>(values, lane);
    return p.tile == 64 ? largest<8>(values, lane) : largest<16>(values, lane);
  }

  // The largest magnitude of the values of a team's lanes, as an integer.
  template <int team>
  MLA_DEVICE static int largest(const float (&values)[8], int lane) {
    int most = 0;
    for (int i = 0; i < 8; ++i) {
      const int size = static_cast<int>(bits_of<Wave>(values[i]) & 0x7fffffff);
      most = size > most ? size : most;
    }
    return Wave::template max_over<team>(most, lane);
  }

  MLA_DEVICE static void store_octet(const AppendKvParams& p, uint8_t* field, int octet, const float (&values)[8]) {
    if constexpr (one_run) {
      if (p.latent_encoding == ENCODED_E2M1) store_as<ENCODED_E2M1>(field, octet, values);
      else store_as<ENCODED_E4M3FN>(field, octet, values);
      return;
    }
    if (p.latent_encoding == ENCODED_BF16) store_as<ENCODED_BF16>(field, octet, values);
    else if (p.latent_encoding == ENCODED_FP16) store_as<ENCODED_FP16>(field, octet, values);
    else if (p.latent_encoding == ENCODED_FP32) store_as<ENCODED_FP32>(field, octet, values);
    else if (p.latent_encoding == ENCODED_E4M3FN) store_as<ENCODED_E4M3FN>(field, octet, values);
    else store_as<ENCODED_E4M3FNUZ>(field, octet, values);
  }

  template <int encoding>
  MLA_DEVICE static void store_as(uint8_t* field, int octet, const float (&values)[8]) {
    uint32_t codes[8];
    for (int i = 0; i < 8; ++i) codes[i] = encode<Wave, encoding>(bits_of<Wave>(values[i]));
    if constexpr (encoding == ENCODED_FP32) {
      auto* to = reinterpret_cast<Vec<uint32_t, 4>*>(field) + 2 * octet;
      to[0] = Vec<uint32_t, 4>{{codes[0], codes[1], codes[2], codes[3]}};
      to[1] = Vec<uint32_t, 4>{{codes[4], codes[5], codes[6], codes[7]}};
    } else if constexpr (encoding == ENCODED_BF16 || encoding == ENCODED_FP16) {
      Vec<uint32_t, 4> words;
      for (int i = 0; i < 4; ++i) words[i] = codes[2 * i] | codes[2 * i + 1] << 16;
      reinterpret_cast<Vec<uint32_t, 4>*>(field)[octet] = words;
    } else if constexpr (encoding == ENCODED_E2M1) {
      uint32_t word = 0;
      for (int i = 0; i < 8; ++i) word |= codes[i] << 4 * i;
      reinterpret_cast<uint32_t*>(field)[octet] = word;
    } else {
      Vec<uint32_t, 2> words;
      for (int i = 0; i < 2; ++i)
        words[i] = codes[4 * i] | codes[4 * i + 1] << 8 | codes[4 * i + 2] << 16 | codes[4 * i + 3] << 24;
      reinterpret_cast<Vec<uint32_t, 2>*>(field)[octet] = words;
    }
  }
};

}  // namespace mla
