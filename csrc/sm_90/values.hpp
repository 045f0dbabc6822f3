// The two warpgroups that hold the result: O = O * factor + P V, 256 columns each, and its way to memory.
#pragma once

#include "sm_90/awaited.hpp"
#include "sm_90/cluster.hpp"
#include "sm_90/loader.hpp"
#include "sm_90/together.hpp"

namespace mla::sm90 {

template <class Policy>
class Values {
  using T = typename Policy::Type;
  using Params = typename Policy::Params;

 public:
  // `side` 0 holds columns 0..255, side 1 the others.
  MLA_DEVICE Values(const Params& params, uint32_t shared, int side)
      : params_(params), barriers_(shared), shared_(shared), side_(side) {}

  // Does what the scores warpgroup orders, slot by slot. Each P V is waited for at once: the next P is handed over a
  // whole Q K^T later, and a stage given back early is worth more than a P V queued early.
  MLA_DEVICE void run() {
    if (Policy::awaited(params_)) promise();
    for (;;) {
      int order = next_order();
      if (order & STOP) return;
      // Written for both cases: otherwise the compiler takes the registers to be live since the last item.
#pragma unroll
      for (int i = 0; i < 64; ++i) o_[0][i] = o_[1][i] = 0.0f;
      if (order & (MULTIPLY | QUERIES)) {
        stages_.next();
        stages_.next();
      }
      if (order & MULTIPLY) {
        begin_product(false);
        while (!(order & LAST)) {
          end_product();
          give_back_slot();
          order = next_order();
          begin_product(order & RESCALE);
        }
        Ending ending = find_rows();
        const int last = slots_.stage;
        slots_.next();
        next_order();
        finish_rows(ending);
        wait_for_product();
        barrier_arrive(barriers_.p_empty(last));
        if constexpr (Policy::TOGETHER) return merge(ending);
        store(ending);
        __syncwarp();
        give_back_stage();
      } else {
        Ending ending = find_rows();
        finish_rows(ending);
        if constexpr (Policy::TOGETHER) return merge(ending);
        store_zeros(ending);
      }
    }
  }

 private:
  // Makes the words of this block's partial NOT_YET while the first keys are on their way, and lets combine start.
  MLA_DEVICE void promise() const {
    wait_for_turn();
    const int64_t first = static_cast<int64_t>(blockIdx.y) * Policy::rows(params_) + first_row();
    const int rows = min(ROWS, Policy::rows(params_) - first_row());
    const int lane = group_thread() % 32;
    for (int row = group_thread() / 32; row < rows; row += 4) {
      uint4* to = reinterpret_cast<uint4*>(params_.partial_out + (first + row) * D_V + side_ * VALUE_COLUMNS);
#pragma unroll
      for (int at = 0; at < VALUE_COLUMNS / 4; at += 32)
        store_arriving(to + at + lane, make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET));
      if (side_ == 0 && lane == 0) store_arriving(params_.partial_lse + first + row, bit_cast<float>(NOT_YET));
    }
    __threadfence();
    asm volatile("bar.sync %0, 256;" ::"n"(VALUES_BARRIER) : "memory");
    give_turn();
  }

  MLA_DEVICE uint32_t slot() const { return shared_ + Policy::P_OFFSET + slots_.stage * Policy::P_SLOT_BYTES; }
  MLA_DEVICE int row() const { return group_thread() / 32 * 16 + group_thread() % 32 / 4; }

  MLA_DEVICE int next_order() {
    barrier_wait(barriers_.p_full(slots_.stage), slots_.parity);
    return uniform(load_shared<int>(slot() + Policy::ORDER + group_thread() / 32 * 4));
  }

  // This warp has read the slot.
  MLA_DEVICE void give_back_slot() {
    __syncwarp();
    barrier_arrive(barriers_.p_empty(slots_.stage));
    slots_.next();
  }

  // Starts O = O * factor + P V.
  MLA_DEVICE void begin_product(bool rescale) {
    barrier_wait(barriers_.kv_full(stages_.stage), stages_.parity);
    fence_async();  // for P, and for keys brought by ordinary copies; here, because the scores' time is scarcer
    if (__builtin_expect(rescale, 0)) {
      const float factor[2] = {load_shared<float>(slot() + Policy::FACTOR + row() * 4),
                               load_shared<float>(slot() + Policy::FACTOR + row() * 4 + 32)};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        o_[0][i] *= factor[i / 2 % 2];
        o_[1][i] *= factor[i / 2 % 2];
      }
    }
    const uint64_t p = operand(uniform(slot()), 128, 256, Swizzle::none);
    const uint64_t v = operand(uniform(shared_ + Policy::KV_OFFSET + stages_.stage * Policy::STAGE_BYTES +
                                       side_ * (VALUE_COLUMNS / 64) * Policy::BLOCK_BYTES),
                               Policy::BLOCK_BYTES, Policy::GROUP_BYTES, Swizzle::bytes128);
    pin(o_[0]);
    pin(o_[1]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Policy::KEYS / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        values_mma<T>(o_[half], advance(p, k * 2048),
                      advance(v, half * 2 * Policy::BLOCK_BYTES + k * 2 * Policy::GROUP_BYTES), true);
    wgmma_commit();
  }

  // Waits for the product; then its stage may be filled again.
  MLA_DEVICE void end_product() {
    wait_for_product();
    give_back_stage();
  }

  MLA_DEVICE void wait_for_product() {
    wgmma_wait<0>();
    pin(o_[0]);
    pin(o_[1]);
    __syncwarp();
  }

  MLA_DEVICE void give_back_stage() {
    warp_release<Policy>(barriers_.kv_empty(stages_.stage));
    stages_.next();
  }

  // Where this warp's rows go: a lane stores 16 bytes at a time, of every fourth row. And the reciprocal denominators
  // of the lane's rows of O, which are other rows.
  struct Ending {
    bool partial;
    float* lse;          // of the block's rows
    char* begin;         // of the sequence's rows
    uint32_t offset[4];  // from `begin`, in units of 16 bytes; NO_ROW where there is no row
    float inverse[2];
    int sequence;  // this and the rows' lse where cuts are merged together
    float own_lse[2];
  };
  static constexpr uint32_t NO_ROW = ~0u;

  MLA_DEVICE int stored_row(int i) const { return group_thread() / 32 * 16 + i * 4 + group_thread() % 32 / 8; }

  // For the item that the slot names; called while the last product is computed.
  MLA_DEVICE Ending find_rows() const {
    const int partial_row = uniform(load_shared<int>(slot() + Policy::ITEM + 4));
    const int sequence = uniform(load_shared<int>(slot() + Policy::ITEM));
    if constexpr (!Policy::TOGETHER) return find_rows(sequence, partial_row);
    Ending ending;
    ending.sequence = sequence;
    return ending;
  }

  MLA_DEVICE Ending find_rows(int sequence, int partial_row) const {
    Ending ending;
    const Queries queries(params_, sequence);
    const Heads heads(params_);
    ending.partial = partial_row >= 0;
    if (ending.partial) {
      const int64_t first = static_cast<int64_t>(partial_row) * Policy::rows(params_);
      ending.begin = reinterpret_cast<char*>(params_.partial_out + first * D_V + side_ * VALUE_COLUMNS);
      ending.lse = params_.partial_lse + first + first_row();
    } else {
      ending.begin = static_cast<char*>(params_.out) +
                     2 * (queries.first_token * params_.out_token_stride + side_ * VALUE_COLUMNS);
      ending.lse = params_.lse + queries.first_token * params_.heads + first_row();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Row mine(heads, queries, first_row() + stored_row(i));
      const uint32_t of_token = static_cast<uint32_t>(params_.out_token_stride >> 3);
      const uint32_t of_head = static_cast<uint32_t>(params_.out_head_stride >> 3);
      ending.offset[i] = ending.partial ? mine.index * (D_V / 4) : mine.token * of_token + mine.head * of_head;
      if (!mine.valid) ending.offset[i] = NO_ROW;
    }
    return ending;
  }

  // Takes the reciprocals from the slot that finishes the item, and writes the rows' lse to memory.
  MLA_DEVICE void finish_rows(Ending& ending) {
    ending.inverse[0] = load_shared<float>(slot() + Policy::INVERSE + row() * 4);
    ending.inverse[1] = load_shared<float>(slot() + Policy::INVERSE + row() * 4 + 32);
    if constexpr (Policy::TOGETHER) {
      ending.own_lse[0] = load_shared<float>(slot() + Policy::LSE + row() * 4);
      ending.own_lse[1] = load_shared<float>(slot() + Policy::LSE + row() * 4 + 32);
    } else if (side_ == 0 && group_thread() % 8 == 0)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (ending.offset[i] != NO_ROW)
          put_in_memory(ending.lse[stored_row(i)], load_shared<float>(slot() + Policy::LSE + stored_row(i) * 4));
    give_back_slot();
  }

  // Merges this block's cut with its peer's and stores one side of the columns; the other side's warpgroup sends. They
  // meet twice: when all stages of both are free, and when what was sent is there.
  MLA_DEVICE void merge(Ending& ending) {
    const bool sends = side_ != static_cast<int>(cluster_rank());
    if (side_ == 0 && group_thread() % 4 == 0) {
      const uint32_t there = at_peer(shared_ + Policy::PEER_LSE + row() * 4);
      peer_store4(there, ending.own_lse[0]);
      peer_store4(there + 32, ending.own_lse[1]);
    }
    cluster_meet();
    weigh(ending);
    const uint32_t place = shared_ + Policy::KV_OFFSET + group_thread() * 16;
    if (sends) {
      const uint32_t there = at_peer(place);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float (&o)[64] = o_[i / 16];
        const int at = i % 16 * 4;
        peer_store16(there + i * 2048, o[at] * ending.inverse[0], o[at + 1] * ending.inverse[0],
                     o[at + 2] * ending.inverse[1], o[at + 3] * ending.inverse[1]);
      }
    }
    cluster_meet();
    if (sends) return;
    const Ending rows = find_rows(ending.sequence, -1);
    const uint32_t room =
        shared_ + Policy::KV_OFFSET + SENT_STAGES * Policy::STAGE_BYTES + group_thread() / 32 * (2 * PIECE_BYTES);
    by_pieces<VALUE_COLUMNS * 2 / 128, 1>(room, rows,
                                          [&](int piece, uint32_t to) { put_merged(piece, to, ending, place); });
  }

  // 64 columns, as put_result puts them, of both cuts; the other's lie at `received`.
  MLA_DEVICE void put_merged(int piece, uint32_t to, const Ending& ending, uint32_t received) const {
    const int lane = group_thread() % 32;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int tile = piece * 8 + pair * 2;
      const float (&o)[64] = o_[tile / 16];
      const int at = tile % 16 * 4;
      float other[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(other[i]), "=f"(other[i + 1]), "=f"(other[i + 2]), "=f"(other[i + 3])
                     : "r"(received + (tile + i / 4) * 2048)
                     : "memory");
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        four[i] = pack<T>(__fmaf_rn(o[at + 2 * i], ending.inverse[i % 2], other[2 * i]),
                          __fmaf_rn(o[at + 2 * i + 1], ending.inverse[i % 2], other[2 * i + 1]));
      put_tiles(pair, lane, to, four);
    }
  }

  // Multiplies the reciprocals of this lane's rows by what their cut counts, and stores the rows' lse. A cut that
  // counts nothing is zero, whatever it holds.
  MLA_DEVICE void weigh(Ending& ending) {
    const Queries queries(params_, ending.sequence);
    const Heads heads(params_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row mine(heads, queries, first_row() + row() + half * 8);
      const float* sink = params_.attn_sink == nullptr ? nullptr : params_.attn_sink + mine.head;
      const float other = load_shared<float>(shared_ + Policy::PEER_LSE + (row() + half * 8) * 4);
      const Share share(ending.own_lse[half], other, sink);
      ending.inverse[half] *= share.weight;
      if (side_ == 0 && cluster_rank() == 0 && group_thread() % 4 == 0 && mine.valid)
        params_.lse[queries.first_token * params_.heads + mine.index] = share.lse;
      if (bit_cast<int>(share.weight) == 0)
#pragma unroll
        for (int i = 0; i < 64; ++i)
          if (i / 2 % 2 == half) o_[0][i] = o_[1][i] = 0.0f;
    }
  }

  // A store takes one clock for each line of memory it touches, and a quad holds at most 32 contiguous bytes of a row.
  // So a warp's 16 rows go through shared memory, 128 bytes of each at a time, and leave in whole lines. The room is
  // the stage that was read last, once both warpgroups are done with it.
  MLA_DEVICE void store(const Ending& ending) {
    asm volatile("bar.sync %0, 256;" ::"n"(VALUES_BARRIER) : "memory");
    const uint32_t mine = shared_ + Policy::KV_OFFSET + stages_.stage * Policy::STAGE_BYTES +
                          (side_ * 4 + group_thread() / 32) * (2 * PIECE_BYTES);
    if (ending.partial)
      by_pieces<VALUE_COLUMNS * 4 / 128, 2>(mine, ending,
                                            [&](int piece, uint32_t to) { put_partial(piece, to, ending); });
    else
      by_pieces<VALUE_COLUMNS * 2 / 128, 1>(mine, ending,
                                            [&](int piece, uint32_t to) { put_result(piece, to, ending); });
  }

  // Each piece is put to shared memory while the one before is carried to memory. `PAIRS` is 2 where the swizzle moves
  // places by twice the row, else 1.
  template <int PIECES, int PAIRS, class Put>
  MLA_DEVICE void by_pieces(uint32_t at, const Ending& ending, const Put& put) const {
    put(0, at);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
      carry<PAIRS>(piece, at + piece % 2 * PIECE_BYTES, ending, [&] {
        if (piece + 1 < PIECES) put(piece + 1, at + (piece + 1) % 2 * PIECE_BYTES);
      });
  }

  static constexpr int PIECE_BYTES = 16 * 128;  // of a warp's rows; one is written while another is read
  static_assert(8 * 2 * PIECE_BYTES <= Policy::STAGE_BYTES, "all warps' pieces lie in a stage");
  static constexpr int SENT_STAGES = 3;  // of the ring, for what the peer sends; pieces lie in the stage behind
  static_assert(!Policy::TOGETHER ||
                    (ROWS * VALUE_COLUMNS * 4 <= SENT_STAGES * Policy::STAGE_BYTES && SENT_STAGES < Policy::STAGES),
                "one side of the columns and the pieces lie in the ring");

  // 64 columns in 16 bits. The i-th 16 bytes of row r lie at place i ^ r % 8, so that writes and reads use all banks.
  MLA_DEVICE void put_result(int piece, uint32_t to, const Ending& ending) const {
    const int lane = group_thread() % 32;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int tile = piece * 8 + pair * 2;
      const float (&o)[64] = o_[tile / 16];
      const int at = tile % 16 * 4;
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)  // both halves of the first tile's rows, then of the second's
        four[i] = pack<T>(o[at + 2 * i] * ending.inverse[i % 2], o[at + 2 * i + 1] * ending.inverse[i % 2]);
      put_tiles(pair, lane, to, four);
    }
  }

  MLA_DEVICE static void put_tiles(int pair, int lane, uint32_t to, const uint32_t (&four)[4]) {
    const uint32_t place = lane % 16 * 128 + ((pair * 2 + lane / 16) ^ lane % 8) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + place), "r"(four[0]),
                 "r"(four[1]), "r"(four[2]), "r"(four[3])
                 : "memory");
  }

  // 32 columns in fp32. The i-th 16 bytes of row r lie at place i ^ r % 4 * 2.
  MLA_DEVICE void put_partial(int piece, uint32_t to, const Ending& ending) const {
    const int lane = group_thread() % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tile = piece * 4 + i;
      const float (&o)[64] = o_[tile / 16];
      const int at = tile % 16 * 4;
      const uint32_t place = lane / 4 * 128 + ((i * 2 + lane % 4 / 2) ^ lane / 4 % 4 * 2) * 16 + lane % 2 * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + place + half * 1024),
                     "f"(o[at + 2 * half] * ending.inverse[half]), "f"(o[at + 2 * half + 1] * ending.inverse[half])
                     : "memory");
    }
  }

  // A piece from shared memory to memory, four rows at a time; `meanwhile` runs while they are read, or afterwards.
  template <int PAIRS, class Meanwhile>
  MLA_DEVICE void carry(int piece, uint32_t from, const Ending& ending, const Meanwhile& meanwhile) const {
    const int lane = group_thread() % 32;
    uint4 columns[4];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      const uint32_t place = row * 128 + (lane % 8 ^ row * PAIRS % 8) * 16;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(columns[i].x), "=r"(columns[i].y), "=r"(columns[i].z), "=r"(columns[i].w)
                   : "r"(from + place)
                   : "memory");
    }
    if constexpr (!Policy::PAIRED) meanwhile();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (ending.offset[i] != NO_ROW)
        put_in_memory(reinterpret_cast<uint4*>(ending.begin)[ending.offset[i] + (piece * 8 + lane % 8)], columns[i]);
    if constexpr (Policy::PAIRED) meanwhile();  // earlier would take registers that pairs lack
  }

  // The result of an item without keys.
  MLA_DEVICE void store_zeros(const Ending& ending) const {
    const int pieces = VALUE_COLUMNS * (ending.partial ? 4 : 2) / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (ending.offset[i] != NO_ROW)
#pragma unroll 1
        for (int at = group_thread() % 8; at < pieces; at += 8)
          put_in_memory(reinterpret_cast<uint4*>(ending.begin)[ending.offset[i] + at], make_uint4(0, 0, 0, 0));
  }

  // Combine may be loading what is a partial.
  template <class Words>
  MLA_DEVICE static void put_in_memory(Words& to, const Words& words) {
    if constexpr (Policy::AWAITABLE)
      store_arriving(&to, words);
    else
      to = words;
  }

  template <class V>
  MLA_DEVICE V load_shared(uint32_t from) const {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return bit_cast<V>(value);
  }

  const Params& params_;
  Barriers<Policy> barriers_;
  uint32_t shared_;
  int side_;
  Ring<Policy::STAGES> stages_;
  Ring<Policy::P_SLOTS> slots_;
  float o_[2][64];  // columns 0..127 and 128..255 of this side
};

}  // namespace mla::sm90
