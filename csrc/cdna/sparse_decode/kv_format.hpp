// The KV formats of sparse decode: how a selected token is stored, and how a wave turns eight of them into bf16 rows of
// a SwizzledLdsTile.
//
// A load brings 16 bytes per lane: 128 bytes of each of eight tokens, four neighbouring lanes to a token's 64 bytes. 16
// fp8 values become two slots of a tile. The lanes are dealt to tokens so that eight neighbouring lanes write four even
// slots of one token and four odd slots of another, and so meet all banks once; see GatherLane.
#pragma once

#include "cdna/common/swizzled_lds_tile.hpp"
#include "cdna/sparse_decode/topk_lists.hpp"

namespace cdna::sparse {

// Invalid keys are read here: zeros in every format, with a scale of zero, so that no token is ever loaded that was not
// selected, and nothing needs to be cleared.
namespace {
__attribute__((constant)) const uint32_t ZERO_TOKEN[288] = {};
}
MLA_DEVICE uint64_t zero_token() { return reinterpret_cast<uint64_t>(&ZERO_TOKEN); }

template <class T>
MLA_DEVICE T load_global(uint64_t at) {
  return *reinterpret_cast<const __attribute__((address_space(1))) T*>(at);
}

// A lane's share of eight tokens.
struct GatherLane {
  uint32_t token;  // 0..7
  uint32_t half;   // of 128 bytes: which 64
  uint32_t part;   // of 64 bytes: which 16

  MLA_DEVICE explicit GatherLane(uint32_t lane)
      : token((lane >> 3 & 3) | (lane & 4)), half(lane >> 5), part(lane & 3) {}
  MLA_DEVICE uint32_t piece() const { return half << 2 | part; }      // of 16 fp8 values among 128
  MLA_DEVICE uint32_t slot() const { return piece() ^ (token & 4); }  // of 8 bf16 values among 64
};

// The offsets at which a lane writes the tokens 8 n + 0..7 of a tile, relative to the first of them, for even n. For
// odd n the slots of each pair are exchanged.
struct GatherWriteMap {
  uint32_t first;  // of 16 fp8 values, which fill two slots; the second is the other of its pair
  uint32_t whole;  // of a slot of bf16 values

  template <class Tile>
  MLA_DEVICE static GatherWriteMap of(const GatherLane& lane) {
    const uint32_t row = lane.token << 7 | static_cast<uint32_t>(Tile::swizzle(static_cast<int>(lane.token))) << 4;
    return GatherWriteMap{(lane.half << 10 | row) ^ lane.part << 5, row ^ lane.slot() << 4};
  }
  MLA_DEVICE GatherWriteMap for_group(uint32_t odd) const { return GatherWriteMap{first ^ odd << 4, whole ^ odd << 4}; }
  MLA_DEVICE bool lower_half() const { return (first & 1024) == 0; }
};

// Returns the value that lane `which` of each four neighbouring lanes holds; to the upper two of them, that of lane
// `which` + `apart`.
template <int which, int apart = 0>
MLA_DEVICE uint32_t from_quad(uint32_t x) {
  constexpr int lanes = which * 0x55 + apart * 0x50;
  return static_cast<uint32_t>(__builtin_amdgcn_update_dpp(0, static_cast<int>(x), lanes, 0xf, 0xf, true));
}

// Dequantises 16 fp8 values to bf16 and writes them to their two slots.
//
// `Convert` is the arch's way from stored values to bf16, with the scale of the 16 values:
//   from_e8m0, from_fp32   the bits of a scale as it is stored -> those that the constructor takes as a float
//   prepared               the 16 values in the form that low and high take
//   low, high              two values of four, times the scale
template <class Convert>
MLA_DEVICE void dequant_piece(u32x4 raw, Convert convert, uint32_t at, const GatherWriteMap& map) {
  const u32x4 values = convert.prepared(raw);
  const uint32_t a = values[0], b = values[1], c = values[2], d = values[3];
  lds_write16(lds_pointer(at + map.first), u32x4{convert.low(a), convert.high(a), convert.low(b), convert.high(b)});
  lds_write16(lds_pointer(at + (map.first ^ 16)),
              u32x4{convert.low(c), convert.high(c), convert.low(d), convert.high(d)});
  __builtin_amdgcn_sched_barrier(0);  // or all pieces are converted at once, in more registers than there are
}

// The same of 16 e2m1 values; see V41AnyFormat.
template <class Convert>
MLA_DEVICE void dequant_piece(u32x2 raw, Convert convert, uint32_t at, const GatherWriteMap& map) {
  const uint32_t a = raw[0], b = raw[1];
  lds_write16(lds_pointer(at + map.first), convert.eight(a));
  lds_write16(lds_pointer(at + (map.first ^ 16)), convert.eight(b));
  __builtin_amdgcn_sched_barrier(0);
}

// The same in two steps, where the tile is not free yet: 16 values in registers, then in their two slots. LLVM 22 makes
// other code of a dequant_piece that consists of these.
struct Slots {
  u32x4 first, second;

  template <class Convert>
  MLA_DEVICE static Slots dequantised(u32x4 raw, Convert convert) {
    const u32x4 values = convert.prepared(raw);
    const uint32_t a = values[0], b = values[1], c = values[2], d = values[3];
    Slots slots{u32x4{convert.low(a), convert.high(a), convert.low(b), convert.high(b)},
                u32x4{convert.low(c), convert.high(c), convert.low(d), convert.high(d)}};
    asm volatile("" : "+v"(slots.first), "+v"(slots.second));  // or they are computed where they are written
    return slots;
  }
  template <class Convert>
  MLA_DEVICE static Slots dequantised(u32x2 raw, Convert convert) {
    const uint32_t a = raw[0], b = raw[1];
    Slots slots{convert.eight(a), convert.eight(b)};
    asm volatile("" : "+v"(slots.first), "+v"(slots.second));
    return slots;
  }
  MLA_DEVICE void write(uint32_t at, const GatherWriteMap& map) const {
    lds_write16(lds_pointer(at + map.first), first);
    lds_write16(lds_pointer(at + (map.first ^ 16)), second);
  }
};

// 584 bytes: 448 fp8 values and 64 bf16 ones, tokens 576 bytes apart, and behind all tokens of a page 8 bytes each with
// seven E8M0 scales of 64 values.
template <class Convert>
struct Dsv4Format {
  static constexpr int qk_dim = 512;
  static constexpr bool separate_scales = true;  // scales have an address of their own
  static constexpr int raw_registers = 21;
  static constexpr bool is_dequantised = true;
  static constexpr bool has_fp4 = false;
  static constexpr bool descaled = false;

  struct Raw {
    u32x4 latent[4];  // half the lanes have none of the last
    u32x4 rope;
    uint32_t scale;  // byte 2 * part + half
  };

  MLA_DEVICE static uint64_t row_at(const SelectedToken& token) {
    return token.page_at + token.in_page * static_cast<uint64_t>(576);
  }
  MLA_DEVICE static uint64_t scales_at(const SelectedToken& token) {
    return token.page_at + static_cast<uint64_t>(token.page) * 576 + token.in_page * static_cast<uint64_t>(8);
  }

  // Half the lanes load this. It comes before everything else, or a scale is widened behind the branch by an
  // instruction that waits.
  MLA_DEVICE static void load_half(Raw& raw, uint64_t row, const GatherLane& lane) {
    if (lane.half == 0) raw.latent[3] = load_global<u32x4>(row + lane.piece() * 16 + 3 * 128);
  }
  MLA_DEVICE static void load(Raw& raw, uint64_t row, uint64_t scales, const GatherLane& lane) {
    const uint64_t at = row + lane.piece() * 16;
    raw.scale = load_global<uint8_t>(scales + 2 * lane.part + lane.half);
#pragma unroll
    for (int m = 0; m < 3; ++m) raw.latent[m] = load_global<u32x4>(at + m * 128);
    raw.rope = load_global<u32x4>(row + 448 + lane.slot() * 16);
  }

  static constexpr int pieces = 5;
  MLA_DEVICE static void store(int piece, const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    const uint32_t scale = Convert::from_e8m0(raw.scale);
    if (piece == 0) store_one<0>(raw, scale, at, map);
    if (piece == 1) store_one<1>(raw, scale, at, map);
    if (piece == 2) store_one<2>(raw, scale, at, map);
    if (piece == 3 && map.lower_half()) store_one<3>(raw, scale, at, map);
    if (piece == 4) lds_write16(lds_pointer(at + map.whole + 7 * 1024), raw.rope);
  }

  // All lanes dequantise the last 64 values, for a branch would cost more; half of them write.
  MLA_DEVICE static Slots converted(int piece, const Raw& raw) {
    const uint32_t scale = Convert::from_e8m0(raw.scale);
    if (piece == 0) return converted_one<0>(raw, scale);
    if (piece == 1) return converted_one<1>(raw, scale);
    if (piece == 2) return converted_one<2>(raw, scale);
    if (piece == 3) return converted_one<3>(raw, scale);
    return Slots{raw.rope, {}};
  }
  MLA_DEVICE static void write(const Slots (&converted)[pieces], uint32_t at, const GatherWriteMap& map) {
#pragma unroll
    for (int m = 0; m < 3; ++m) converted[m].write(at + m * 2048, map);
    if (map.lower_half()) converted[3].write(at + 3 * 2048, map);
    lds_write16(lds_pointer(at + map.whole + 7 * 1024), converted[4].first);
  }

 private:
  template <int m>
  MLA_DEVICE static Slots converted_one(const Raw& raw, uint32_t scale) {
    return Slots::dequantised(raw.latent[m], Convert{mla::bit_cast<float>(from_quad<m>(scale))});
  }
  template <int m>
  MLA_DEVICE static void store_one(const Raw& raw, uint32_t scale, uint32_t at, const GatherWriteMap& map) {
    dequant_piece(raw.latent[m], Convert{mla::bit_cast<float>(from_quad<m>(scale))}, at + m * 2048, map);
  }
};

// 512 fp8 values, four fp32 scales of 128 values, and 64 bf16 values or none: 656 or 528 bytes.
template <class Convert, int bf16_values = 64>
struct V32Format {
  static constexpr int qk_dim = 512 + bf16_values;
  static constexpr bool separate_scales = false;
  static constexpr int raw_registers = 21;
  static constexpr bool is_dequantised = true;
  static constexpr bool has_fp4 = false;
  static constexpr bool descaled = false;

  struct Raw {
    u32x4 latent[4];
    u32x4 rope;
    uint32_t scale;  // number `part`
  };

  MLA_DEVICE static uint64_t row_at(const SelectedToken& token) {
    return token.page_at + token.in_page * static_cast<uint64_t>(528 + 2 * bf16_values);
  }

  MLA_DEVICE static void load_half(Raw&, uint64_t, const GatherLane&) {}
  MLA_DEVICE static void load(Raw& raw, uint64_t row, uint64_t, const GatherLane& lane) {
    raw.scale = load_global<uint32_t>(row + 512 + lane.part * 4);
#pragma unroll
    for (int m = 0; m < 4; ++m) raw.latent[m] = load_global<u32x4>(row + lane.piece() * 16 + m * 128);
    if (bf16_values != 0) raw.rope = load_global<u32x4>(row + 528 + lane.slot() * 16);
  }

  static constexpr int pieces = bf16_values != 0 ? 5 : 4;
  MLA_DEVICE static void store(int piece, const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    if (piece == 0) store_one<0>(raw, at, map);
    if (piece == 1) store_one<1>(raw, at, map);
    if (piece == 2) store_one<2>(raw, at, map);
    if (piece == 3) store_one<3>(raw, at, map);
    if (piece == 4) lds_write16(lds_pointer(at + map.whole + 8 * 1024), raw.rope);
  }

  MLA_DEVICE static Slots converted(int piece, const Raw& raw) {
    if (piece == 0) return converted_one<0>(raw);
    if (piece == 1) return converted_one<1>(raw);
    if (piece == 2) return converted_one<2>(raw);
    if (piece == 3) return converted_one<3>(raw);
    return Slots{raw.rope, {}};
  }
  MLA_DEVICE static void write(const Slots (&converted)[pieces], uint32_t at, const GatherWriteMap& map) {
#pragma unroll
    for (int m = 0; m < 4; ++m) converted[m].write(at + m * 2048, map);
    if constexpr (bf16_values != 0) lds_write16(lds_pointer(at + map.whole + 8 * 1024), converted[4].first);
  }

 private:
  template <int m>
  MLA_DEVICE static Slots converted_one(const Raw& raw) {
    const uint32_t scale = from_quad<m>(Convert::from_fp32(raw.scale));
    return Slots::dequantised(raw.latent[m], Convert{mla::bit_cast<float>(scale)});
  }
  template <int m>
  MLA_DEVICE static void store_one(const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    const uint32_t scale = from_quad<m>(Convert::from_fp32(raw.scale));
    dequant_piece(raw.latent[m], Convert{mla::bit_cast<float>(scale)}, at + m * 2048, map);
  }
};

// Bare rows of fp8 in the arch's flavour: 512 values and, in rows of 576, 64 more. fp8 is exact in bf16, so scores and
// results take the descale that all pools share, as in dense decode.
template <class Convert, int qk_dim_>
struct Fp8Format {
  static constexpr int qk_dim = qk_dim_;
  static constexpr bool separate_scales = false;
  static constexpr int raw_registers = 18;
  static constexpr bool is_dequantised = true;
  static constexpr bool has_fp4 = false;
  static constexpr bool descaled = true;

  struct Raw {
    u32x4 latent[4];
    u32x2 rope;
  };

  MLA_DEVICE static uint64_t row_at(const SelectedToken& token) {
    return token.page_at + token.in_page * static_cast<uint64_t>(qk_dim_);
  }

  MLA_DEVICE static void load_half(Raw&, uint64_t, const GatherLane&) {}
  MLA_DEVICE static void load(Raw& raw, uint64_t row, uint64_t, const GatherLane& lane) {
#pragma unroll
    for (int m = 0; m < 4; ++m) raw.latent[m] = load_global<u32x4>(row + lane.piece() * 16 + m * 128);
    if (has_rope) raw.rope = load_global<u32x2>(row + 512 + lane.slot() * 8);
  }

  static constexpr int pieces = qk_dim_ > 512 ? 5 : 4;
  MLA_DEVICE static void store(int piece, const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    if (piece == 4) {
      lds_write16(lds_pointer(at + map.whole + 8 * 1024), rope(raw));
      __builtin_amdgcn_sched_barrier(0);
    } else {
      dequant_piece(raw.latent[piece], Convert{1.0f}, at + piece * 2048, map);
    }
  }

  MLA_DEVICE static Slots converted(int piece, const Raw& raw) {
    if (piece < 4) return Slots::dequantised(raw.latent[piece], Convert{1.0f});
    __builtin_amdgcn_sched_barrier(0);  // or scores of 16 rows overlap others, a wait state too early (LLVM 22)
    Slots slots{rope(raw), {}};
    asm volatile("" : "+v"(slots.first));
    return slots;
  }
  MLA_DEVICE static void write(const Slots (&converted)[pieces], uint32_t at, const GatherWriteMap& map) {
#pragma unroll
    for (int m = 0; m < 4; ++m) converted[m].write(at + m * 2048, map);
    if constexpr (has_rope) lds_write16(lds_pointer(at + map.whole + 8 * 1024), converted[4].first);
  }

 private:
  static constexpr bool has_rope = qk_dim_ > 512;

  // The lane's slot of the last 64 values.
  MLA_DEVICE static u32x4 rope(const Raw& raw) {
    const Convert convert{1.0f};
    const uint32_t a = raw.rope[0], b = raw.rope[1];
    return u32x4{convert.low(a), convert.high(a), convert.low(b), convert.high(b)};
  }
};

// Rows of bf16 as they are multiplied.
template <int qk_dim_>
struct Bf16Format {
  static constexpr int qk_dim = qk_dim_;
  static constexpr bool separate_scales = false;
  static constexpr int blocks = qk_dim_ / 64;
  static constexpr int raw_registers = 4 * blocks;
  static constexpr bool is_dequantised = false;
  static constexpr bool has_fp4 = false;
  static constexpr bool descaled = false;

  struct Raw {
    u32x4 block[blocks];
  };

  MLA_DEVICE static uint64_t row_at(const SelectedToken& token) {
    return token.page_at + token.in_page * static_cast<uint64_t>(qk_dim_ * 2);
  }

  MLA_DEVICE static void load_half(Raw&, uint64_t, const GatherLane&) {}
  MLA_DEVICE static void load(Raw& raw, uint64_t row, uint64_t, const GatherLane& lane) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) raw.block[b] = load_global<u32x4>(row + lane.slot() * 16 + b * 128);
  }
  static constexpr int pieces = blocks;
  MLA_DEVICE static void store(int piece, const Raw& raw, uint32_t at, const GatherWriteMap& map) {
    lds_write16(lds_pointer(at + map.whole + piece * 1024), raw.block[piece]);
  }
};

}  // namespace cdna::sparse
