// The producer of the row-split mainloop: a ring of SwizzledLdsTiles that four waves fill by 16-byte direct copies,
// each wave a quarter of the keys of every tile.
#pragma once

#include "cdna/common/cross_lane.hpp"
#include "cdna/common/lds_copy.hpp"
#include "cdna/common/rope.hpp"
#include "cdna/common/swizzled_lds_tile.hpp"
#include "common/paged_kv.hpp"
#include "common/problem.hpp"
#include "common/work_tile.hpp"

namespace cdna::mfma_16x16x32 {

// Copies 16 bytes per lane from `from` + offset to LDS address `lds` + 16 * lane. The offset in the instruction counts
// on both sides, and is a constant once the loop around the call is unrolled. It is assembly for the reasons that
// lds_copy.hpp gives; the wait state is for M0.
MLA_DEVICE void copy_16_bytes_to_lds(const char* from, uint32_t lds, int offset) {
  asm volatile("s_nop 0\n\tglobal_load_lds_dwordx4 %0, off offset:%2"
               :
               : "v"(from), "{m0}"(lds - offset), "i"(offset)
               : "memory");
}

template <class Problem, class Policy, int keys>
class LdsRingProducer {
  using Tile = SwizzledLdsTile<Problem::Format::bytes, Problem::row_bytes, keys>;
  static constexpr int wave_keys = keys / Policy::waves;
  static constexpr int groups = wave_keys / 8;  // of a wave
  static constexpr int tails = Tile::has_tail ? wave_keys / 16 : 0;
  static constexpr int block_tiles = WAVE / wave_keys;  // tiles whose page numbers are fetched at once
  static constexpr int page_bytes = 2 * WAVE * 4;       // of a wave: the page numbers of two blocks
  static constexpr int rope_block = Tile::blocks - 1;   // 16-bit rows of 576 have their rope part here

 public:
  // Behind the tile in a stage of un-rotated keys: cosines and sines, 2,048 bytes of a wave.
  static constexpr int cos_sin = Tile::bytes;
  static constexpr int stage_bytes = cos_sin + (Problem::rotate ? Policy::waves * 2048 : 0);
  static constexpr int room = (Policy::lds_bytes - Policy::waves * page_bytes) / stage_bytes;
  static constexpr int stages = room < 4 ? room : 4;
  static constexpr int prefetch = stages - 1;  // tiles in flight while one is multiplied
  static constexpr int lds_bytes = stages * stage_bytes + Policy::waves * page_bytes;
  static constexpr int copies = groups * Tile::blocks + tails + (Problem::rotate ? 2 : 0);  // of a wave per tile
  static constexpr int parts = copies;                                                      // see copy_part
  static constexpr bool in_parts = keys < 128;  // with P in fp8, whose tiles are the largest, LLVM 22 then spills
  static_assert(!Problem::rotate || wave_keys == 8, "LDS ring: rope parts are rotated eight keys to a wave");
  static_assert(prefetch >= 1 && prefetch <= block_tiles, "LDS ring: page numbers arrive a block of tiles ahead");
  static_assert(copies * prefetch < 63, "LDS ring: more copies in flight than can be counted");

  MLA_DEVICE LdsRingProducer(const mla::PagedKv& paged_kv, const mla::WorkTile& work_tile, const float* rope_cos_sin,
                             int tiles, LdsBytes lds, const Lane& lane, int wave)
      : paged_kv_(paged_kv),
        first_key_(work_tile.first_key + wave * wave_keys),
        last_key_(work_tile.end_key - 1),
        lane_(lane.index),
        wave_(wave),
        tiles_(tiles),
        rope_cos_sin_(rope_cos_sin),
        lds_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lds))),
        pages_(lds_ + stages * stage_bytes + wave * page_bytes) {
    fetch_pages(0);
  }

  // Begins to copy the wave's keys of a tile into its stage; tiles come in order. Every load of the wave must have
  // arrived before the first call.
  MLA_DEVICE void copy(int tile, uint32_t stage_offset) {
    begin_copy(tile, stage_offset);
    const uint32_t lane = lane_index();  // kept for all parts it spares 1.5 % of the clocks, but others spill
#pragma unroll
    for (int n = 0; n < parts; ++n) copy_part(n, in_parts ? lane_index() : lane);
  }

  // The same in parts, which the mainloop places between its products.
  MLA_DEVICE void begin_copy(int tile, uint32_t stage_offset) {
    if (__builtin_expect(tile % block_tiles == 0 && tile + block_tiles < tiles_, false))
      fetch_pages(tile / block_tiles + 1);
    tile_ = tile;
    stage_offset_ = stage_offset;
  }
  MLA_DEVICE void copy_part(int n) { copy_part(n, lane_index()); }

  // Returns when this wave's part of `tile` has landed in its stage and is rotated.
  MLA_DEVICE void wait(int tile, uint32_t stage_offset) const {
    if (__builtin_expect(tile + prefetch <= tiles_, true)) {
      wait_vmcnt<copies*(prefetch - 1)>();
    } else {
      wait_vmcnt<0>();
    }
    if constexpr (Problem::rotate) rotate(stage_offset);
  }

  // Stages are named by the offset of their first byte.
  MLA_DEVICE static uint32_t next_stage(uint32_t stage_offset) {
    return stage_offset == (stages - 1) * stage_bytes ? 0 : stage_offset + stage_bytes;
  }

 private:
  MLA_DEVICE void copy_part(int n, uint32_t lane) {
    const uint32_t stage = lds_ + stage_offset_;
    constexpr int blocks = groups * Tile::blocks;
    if (n < blocks) {
      const int j = n / Tile::blocks, block = n % Tile::blocks;
      if (block == 0) {
        const uint32_t in_wave = 8 * j + lane / 8;
        row_ = row_of(tile_, in_wave) + (lane % 8 ^ Tile::swizzle(wave_ * wave_keys + in_wave)) * 16;
      }
      copy_16_bytes_to_lds(row_, stage + (wave_ * groups + j) * Tile::group_bytes + block * 1024, block * 128);
    } else if (n < blocks + tails) {
      const int j = n - blocks;
      const uint32_t in_wave = 16 * j + lane / 4;
      copy_16_bytes_to_lds(row_of(tile_, in_wave) + (lane % 4 ^ Tile::tail_swizzle(in_wave)) * 16,
                           stage + Tile::tail + (wave_ * tails + j) * 1024, Tile::blocks * 128);
    } else if constexpr (Problem::rotate) {
      const int key = first_key_ + tile_ * keys + static_cast<int>(lane / 8);
      const float* from = rope_cos_sin_ + static_cast<int64_t>(key < last_key_ ? key : last_key_) * COS_SIN_FLOATS +
                          first_rotated(lane);
      const int sine = n - blocks - tails;
      copy_16_bytes_to_lds(reinterpret_cast<const char*>(from), cos_sin_at(stage_offset_) + sine * 1024,
                           sine * FIRST_SINE * 4);
    }
  }

  // Begins to read the page numbers of a block of tiles: lane l for the wave's key l of the block.
  MLA_DEVICE void fetch_pages(int block) const {
    const uint32_t lane = static_cast<uint32_t>(rematerialized(lane_));
    const uint32_t key = key_of(block * block_tiles + static_cast<int>(lane / wave_keys), lane % wave_keys);
    copy_words_to_lds(paged_kv_.page_entry(key), pages_ + block % 2 * (WAVE * 4));
  }
  // Values derived from the lane number stay in registers only where there are some to spare.
  MLA_DEVICE uint32_t lane_index() const {
    return static_cast<uint32_t>(Problem::row_tiles > Policy::waves ? rematerialized(lane_) : lane_);
  }
  MLA_DEVICE uint32_t key_of(int tile, uint32_t in_wave) const {
    const int key = first_key_ + tile * keys + static_cast<int>(in_wave);
    return static_cast<uint32_t>(key < last_key_ ? key : last_key_);
  }
  MLA_DEVICE const char* row_of(int tile, uint32_t in_wave) const {
    const uint32_t page_numbers = pages_ + tile / block_tiles % 2 * (WAVE * 4) + tile % block_tiles * wave_keys * 4;
    return paged_kv_.row(lds_read_word(lds_pointer(page_numbers + in_wave * 4)), key_of(tile, in_wave));
  }

  // A lane rotates four values and their partners: those of slot `slot` % 4 of the key's rope part from 4 * (slot / 4)
  // on.
  MLA_DEVICE uint32_t rope_slot(uint32_t lane) const { return lane % 8 ^ Tile::swizzle(wave_ * wave_keys + lane / 8); }
  MLA_DEVICE uint32_t first_rotated(uint32_t lane) const {
    const uint32_t slot = rope_slot(lane);
    return slot % 4 * 8 + slot / 4 * 4;
  }
  MLA_DEVICE uint32_t cos_sin_at(uint32_t stage_offset) const { return lds_ + stage_offset + cos_sin + wave_ * 2048; }

  // Rotates the rope parts of the wave's keys in place.
  MLA_DEVICE void rotate(uint32_t stage_offset) const {
    const uint32_t lane = static_cast<uint32_t>(rematerialized(lane_));
    const uint32_t slot = rope_slot(lane);
    const uint32_t own = lane / 8 * 128 + (slot % 4 ^ Tile::swizzle(wave_ * wave_keys + lane / 8)) * 16 + slot / 4 * 8;
    const uint32_t block = lds_ + stage_offset + wave_ * Tile::group_bytes + rope_block * 1024;
    const f32x4 cos = lds_read_f32x4(lds_pointer(cos_sin_at(stage_offset) + lane * 16));
    const f32x4 sin = lds_read_f32x4(lds_pointer(cos_sin_at(stage_offset) + 1024 + lane * 16));
    const u32x2 first = lds_read8(lds_pointer(block + own));
    const u32x2 second = lds_read8(lds_pointer(block + (own ^ 64)));
    const RotatedWords low =
        rotate_words<Policy, typename Problem::Element>(first[0], second[0], cos[0], cos[1], sin[0], sin[1]);
    const RotatedWords high =
        rotate_words<Policy, typename Problem::Element>(first[1], second[1], cos[2], cos[3], sin[2], sin[3]);
    lds_write8(lds_pointer(block + own), u32x2{low.first, high.first});
    lds_write8(lds_pointer(block + (own ^ 64)), u32x2{low.second, high.second});
  }

  const mla::PagedKv& paged_kv_;
  int first_key_;  // the wave's first key of the work tile
  int last_key_;   // of the work tile
  int lane_;
  int wave_;
  int tiles_;
  const float* rope_cos_sin_;
  uint32_t lds_;
  uint32_t pages_;
  // The tile that is being copied:
  int tile_;
  uint32_t stage_offset_;
  const char* row_;
};

}  // namespace cdna::mfma_16x16x32
