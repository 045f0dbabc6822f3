// The shared memory of a decode block: one struct, whose member offsets are all that the roles use. What the host packs
// for a launch is compared with its size by tests/kernels/test_decode_sm90.py.
#pragma once

#include "sm_90/decode/traits.hpp"

namespace mla::sm_90 {

// One P with everything that the QK warpgroup hands to the PV warpgroups.
struct alignas(16) PStage {
  uint8_t p[BLOCK_M * BLOCK_N * 2];  // P, [BLOCK_N / 16][64 rows x 16 keys]
  float factor[BLOCK_M];             // rescales O before this P, where RESCALE is set; with FINISH see max_logits.hpp
  float inverse[BLOCK_M];            // 1 / denominator, with FINISH
  float lse[BLOCK_M];                // without the sink, with FINISH
  int32_t command[4];                // MmaCommand for each warp's 16 rows
  int32_t sequence;                  // of the work tile, with its last P and with FINISH
  int32_t partial_row;
  int32_t keys_left;  // keys of this P that are the tile's, with its last P (ClusterExchangeP)
  uint8_t unused[100];
};
static_assert(sizeof(PStage) % 128 == 0 && sizeof(PStage) == BLOCK_M * BLOCK_N * 2 + 3 * 4 * BLOCK_M + 128,
              "P_BYTES in mla_suite/archs/sm_90/tile.py says as many");

// A work tile on its way from the producer to the QK warpgroup: a WorkTile, stored by 16 bytes and by 8, and its
// TileInfo.
struct PublishedTile {
  int32_t sequence;
  int32_t length;
  int32_t first_key;
  int32_t end_key;
  int32_t partial_row;
  int32_t info;  // TileInfo
  int32_t unused[2];
};
constexpr int TILE_PARTIAL_ROW = __builtin_offsetof(PublishedTile, partial_row);
constexpr int TILE_INFO = __builtin_offsetof(PublishedTile, info);

struct NoStorage {};

template <class Traits>
struct RawStorage;  // producer_fp8.hpp

// Tiles of a node's sum that lie in shared memory, of the 32 of every PV thread; the others are in global memory.
constexpr int SHARED_TILES = 14;

// Bytes that the producer alone has, behind those of a cluster: the ring of e4m3 rows as they are stored; or, with
// ROTATES, an mbarrier for each stage.
template <class Traits>
MLA_DEVICE constexpr int producer_bytes() {
  if constexpr (Traits::CONVERTS_KEYS) return sizeof(RawStorage<Traits>);
  return Traits::ROTATES ? 8 * Traits::STAGES : 0;
}

// The part that every decode block has. The arrivals of each mbarrier are in kernel.hpp.
template <class Traits>
struct DecodeStorage {
  // The ring of KV stages, then that of the peer's keys.
  uint8_t kv[Traits::STAGES * Traits::STAGE_BYTES + Traits::PEER_STAGES * Traits::PEER_STAGE_BYTES];
  uint8_t q[Traits::Q_SHARED_STEPS * 2048];  // the steps of Q that are not held in registers
  PStage p[Traits::ALL_P_STAGES];
  PublishedTile tiles[Traits::TILE_STAGES];
  uint64_t kv_full[Traits::STAGES];
  uint64_t kv_empty[Traits::STAGES];
  uint64_t p_full[Traits::ALL_P_STAGES];
  uint64_t p_empty[Traits::P_STAGES];
  uint64_t tile_full[Traits::TILE_STAGES];
  uint64_t tile_empty[Traits::TILE_STAGES];
};

// Offsets in bytes from the beginning of a block's shared memory, which is aligned to 1024 bytes.
template <class Traits>
struct SharedStorage {
  using Block = DecodeStorage<Traits>;
  using ClusterStorage = typename Traits::Cluster::template Storage<Traits>;

  static constexpr int KV = __builtin_offsetof(Block, kv);
  static constexpr int PEER_KV = KV + Traits::STAGES * Traits::STAGE_BYTES;
  static constexpr int Q = __builtin_offsetof(Block, q);
  static constexpr int P = __builtin_offsetof(Block, p);
  static constexpr int P_FACTOR = __builtin_offsetof(PStage, factor);  // within a P stage, like the next
  static constexpr int P_INVERSE = __builtin_offsetof(PStage, inverse);
  static constexpr int P_LSE = __builtin_offsetof(PStage, lse);
  static constexpr int P_COMMAND = __builtin_offsetof(PStage, command);
  static constexpr int P_SEQUENCE = __builtin_offsetof(PStage, sequence);
  static constexpr int P_PARTIAL_ROW = __builtin_offsetof(PStage, partial_row);
  static constexpr int P_KEYS_LEFT = __builtin_offsetof(PStage, keys_left);
  static constexpr int TILES = __builtin_offsetof(Block, tiles);
  static constexpr int MBARRIERS = __builtin_offsetof(Block, kv_full);
  static constexpr int CLUSTER_PART = sizeof(Block);  // of ClusterStorage
  static constexpr int CLUSTER_END =
      CLUSTER_PART + (__is_empty(ClusterStorage) ? 0 : static_cast<int>(sizeof(ClusterStorage)));
  // RawStorage, in whole turns of the banks or of the 64-byte swizzle.
  static constexpr int RAW_ALIGNMENT = Traits::SCORES_AS_STORED ? 512 : 128;
  static constexpr int RAW = (CLUSTER_END + RAW_ALIGNMENT - 1) / RAW_ALIGNMENT * RAW_ALIGNMENT;
  static constexpr int ROPE_FULL = CLUSTER_END;                // with ROTATES, an mbarrier for each stage
  static constexpr int PRODUCER_END = (Traits::CONVERTS_KEYS ? RAW : CLUSTER_END) + producer_bytes<Traits>();
  static constexpr int OUT = (PRODUCER_END + 127) / 128 * 128;  // the epilogue's buffers, where no stage holds them
  static constexpr int NODE_SUM = (PRODUCER_END + 15) / 16 * 16;  // with FOLDS, [SHARED_TILES][256 threads][16 B]
  static constexpr int BYTES = Traits::FOLDS            ? NODE_SUM + SHARED_TILES * 256 * 16
                               : Traits::OUT_BYTES == 0 ? PRODUCER_END
                                                        : OUT + Traits::OUT_BYTES;
  static_assert(CLUSTER_PART % alignof(ClusterStorage) == 0, "what a cluster has begins where the block's part ends");
  static_assert(BYTES <= SHARED_MEMORY_LIMIT, "a block has 227 KiB");
};

// Addresses of the mbarriers between the producer and the roles that multiply. `base` is that of the one at offset BASE
// of the block's storage, from which all are counted. They are added in units of mbarriers: another order of the sum
// would be other machine code.
template <class Block, int BASE>
struct PipelineMbarriers {
  uint32_t base;

  MLA_DEVICE uint32_t kv_full(int stage) const { return at(__builtin_offsetof(Block, kv_full), stage); }
  MLA_DEVICE uint32_t kv_empty(int stage) const { return at(__builtin_offsetof(Block, kv_empty), stage); }
  MLA_DEVICE uint32_t tile_full(int stage) const { return at(__builtin_offsetof(Block, tile_full), stage); }
  MLA_DEVICE uint32_t tile_empty(int stage) const { return at(__builtin_offsetof(Block, tile_empty), stage); }

 protected:
  MLA_DEVICE explicit PipelineMbarriers(uint32_t shared) : base(shared + BASE) {}
  MLA_DEVICE uint32_t at(int offset, int number) const { return base + 8 * ((offset - BASE) / 8 + number); }
};

// The mbarriers of a decode block.
template <class Traits>
struct Mbarriers : PipelineMbarriers<DecodeStorage<Traits>, SharedStorage<Traits>::MBARRIERS> {
  using Block = DecodeStorage<Traits>;
  using Storage = SharedStorage<Traits>;

  MLA_DEVICE explicit Mbarriers(uint32_t shared) : PipelineMbarriers<Block, Storage::MBARRIERS>(shared) {}
  MLA_DEVICE uint32_t p_full(int stage) const { return this->at(__builtin_offsetof(Block, p_full), stage); }
  MLA_DEVICE uint32_t p_empty(int stage) const { return this->at(__builtin_offsetof(Block, p_empty), stage); }

  // The mbarriers of RawStorage.
  MLA_DEVICE uint32_t raw_full(int stage) const { return in_raw(__builtin_offsetof(RawStorage<Traits>, full), stage); }
  MLA_DEVICE uint32_t raw_empty(int stage) const {
    return in_raw(__builtin_offsetof(RawStorage<Traits>, empty), stage);
  }

  // The rope parts of a stage's keys have arrived, un-rotated, and the rows of rope_cos_sin with them.
  MLA_DEVICE uint32_t rope_full(int stage) const { return this->at(Storage::ROPE_FULL, stage); }

  // An address within what only this kind of cluster has.
  MLA_DEVICE uint32_t in_cluster(int offset) const { return this->at(Storage::CLUSTER_PART + offset, 0); }

 private:
  MLA_DEVICE uint32_t in_raw(int offset, int stage) const { return this->at(Storage::RAW + offset, stage); }
};

}  // namespace mla::sm_90
