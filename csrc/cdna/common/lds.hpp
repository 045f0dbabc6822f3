// Tiles of cached rows in LDS, without bank conflicts.
//
// A tile keeps 16 keys of 1,024 latent bytes; row strides are multiples of 128 B, so unswizzled rows would all begin in
// the same bank. A row is cut into 16-byte slots and slot s of key k is stored at s ^ (k % 8). Then
//   written or read by key    eight lanes of eight keys, same slot: eight different slots of a 128 B line
//   read by column            eight lanes of one key, consecutive slots: a permutation of one 128 B line
#pragma once

#include "cdna/common/types.hpp"

#define MLA_LDS __attribute__((address_space(3)))

namespace cdna {

using LdsBytes = MLA_LDS char*;

MLA_DEVICE u32x4 lds_read16(LdsBytes at) { return *reinterpret_cast<MLA_LDS u32x4*>(at); }
MLA_DEVICE void lds_write16(LdsBytes at, u32x4 value) { *reinterpret_cast<MLA_LDS u32x4*>(at) = value; }
MLA_DEVICE u32x2 lds_read8(LdsBytes at) { return *reinterpret_cast<MLA_LDS u32x2*>(at); }
MLA_DEVICE void lds_write8(LdsBytes at, u32x2 value) { *reinterpret_cast<MLA_LDS u32x2*>(at) = value; }
MLA_DEVICE f32x4 lds_read_f32x4(LdsBytes at) { return *reinterpret_cast<MLA_LDS f32x4*>(at); }
MLA_DEVICE void lds_write_f32x4(LdsBytes at, f32x4 value) { *reinterpret_cast<MLA_LDS f32x4*>(at) = value; }
MLA_DEVICE uint32_t lds_read_word(LdsBytes at) { return *reinterpret_cast<MLA_LDS uint32_t*>(at); }
MLA_DEVICE void lds_write_word(LdsBytes at, uint32_t value) { *reinterpret_cast<MLA_LDS uint32_t*>(at) = value; }
MLA_DEVICE float lds_read_float(LdsBytes at) { return *reinterpret_cast<MLA_LDS float*>(at); }
MLA_DEVICE void lds_write_float(LdsBytes at, float value) { *reinterpret_cast<MLA_LDS float*>(at) = value; }

// Returns when at most `outstanding` LDS operations of this wave have not finished. The compiler counts them too and
// would wait before each first use; one wait for a group of reads is one instruction instead of one per read.
template <int outstanding>
MLA_DEVICE void wait_lgkmcnt() {
  constexpr int no_other_wait = 0xc07f;  // vmcnt 63, expcnt 7
  __builtin_amdgcn_sched_barrier(0);     // or reads drift behind the wait that counts on them being issued
  __builtin_amdgcn_s_waitcnt(no_other_wait | outstanding << 8);
  __builtin_amdgcn_sched_barrier(0);
}

// Orders LDS accesses of the lanes of one wave. The LDS unit serves a wave in order, so nothing is waited for: this
// only keeps the compiler, which sees one lane, from exchanging a write and another lane's read.
MLA_DEVICE void wave_lds_fence() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

struct LatentLdsTile {
  static constexpr int keys = 16;
  static constexpr int row_bytes = 1024;
  static constexpr int bytes = keys * row_bytes;
  static constexpr int slot_bytes = 16;

  MLA_DEVICE static int slot_offset(int key, int slot) { return key * row_bytes + (slot ^ (key & 7)) * slot_bytes; }
};

// A lane's places in a LatentLdsTile when it holds one key: 32-column chunk c of key lane.column, columns 8 * lane.group.
struct ChunkLdsMap {
  int even, odd;  // chunks 2n and 2n + 1 lie 128 n bytes further

  MLA_DEVICE explicit ChunkLdsMap(const Lane& lane)
      : even(LatentLdsTile::slot_offset(lane.column, lane.group)),
        odd(LatentLdsTile::slot_offset(lane.column, 4 + lane.group)) {}
  MLA_DEVICE int of(int chunk) const { return (chunk & 1 ? odd : even) + (chunk >> 1) * 128; }
};

// The same where a lane holds 16 columns at once: chunks 2 n and 2 n + 1 are columns 64 n + 16 * lane.group.
struct PairedChunkLdsMap {
  int first, second;

  MLA_DEVICE explicit PairedChunkLdsMap(const Lane& lane)
      : first(LatentLdsTile::slot_offset(lane.column, 2 * lane.group)),
        second(LatentLdsTile::slot_offset(lane.column, 2 * lane.group + 1)) {}
  MLA_DEVICE int of(int chunk) const { return (chunk & 1 ? second : first) + (chunk >> 1) * 128; }
};

template <int together>
struct ChunkLdsMapFor {
  using Places = ChunkLdsMap;
};
template <>
struct ChunkLdsMapFor<2> {
  using Places = PairedChunkLdsMap;
};

// A lane's places when it holds columns: keys 4 * lane.group + 0..3, columns 8 * lane.column of 128-column block b.
struct ColumnLdsMap {
  int first[4];  // block b lies 256 b bytes further

  MLA_DEVICE explicit ColumnLdsMap(const Lane& lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) first[j] = LatentLdsTile::slot_offset(4 * lane.group + j, lane.column);
  }
  MLA_DEVICE int of(int block, int j) const { return first[j] + block * 256; }
};

}  // namespace cdna
