// append_kv of many tokens to a workgroup, where rows are as append_row.hpp has them: nothing is looked up before
// memory is busy.
//
// A workgroup of 32 warps, one on an SM, has up to 512 neighbouring tokens, a warp every 32nd of them. It knows at once
// which of its own tokens have the same slot, and writes only the last of these; whether a token of a later workgroup
// has the slot it looks up beside the rows, some slots before each. A row that should not have been written is put
// right at the end: the warp that wrote it writes the row of the last token with that slot over it, each lane where it
// wrote. So whatever the order, what a workgroup writes last to a slot is the right row.
#pragma once

#include "sm_90/append_last.hpp"
#include "sm_90/append_stage.hpp"

namespace sm_90 {

struct AppendRows {
  using Params = mla::AppendKvParams;
  static constexpr int waves = 32, most_tokens = 512;
  static constexpr int ahead = 2;  // rows of a warp under way: with 1, 3 and 4 it takes longer

  // A row to be written: how far behind the cache's begin, or negative where it is not to be.
  struct Listed {
    int64_t to;
    int token, position;
  };
  struct Shared {
    LastTokens table;
    Listed rows[waves][most_tokens / waves];
  };

  MLA_DEVICE static void run(const Params& p) {
    MLA_SHARED Shared shared;
    with_append_row(p, [&](auto row) { write(p, shared, row); });
  }

  template <class Row>
  MLA_DEVICE static void write(const Params& p, Shared& shared, Row row) {
    Wave::wait_for_producer();
    Wave::release_consumer();
    LastTokens& table = shared.table;
    const int thread = mla::thread_id(), lane = thread % 32;
    const int wave = Wave::uniform(thread / 32);
    const int first = mla::block_id_x() * p.group;
    const int count = p.tokens - first < p.group ? p.tokens - first : p.group;
    const int end = first + count;
    const int rows = (count - wave + waves - 1) / waves;  // of this warp
    Listed* list = shared.rows[wave];
    const Ring<Row> ring(wave);

    // Lane i asks what is to be known of the warp's i-th token.
    Listed own{-1, first + wave + waves * lane, 0};
    RawIndex index, where;
    if (lane < rows) index.load(p.slot_mapping, p.wide_slots, own.token);
    if (Row::rotated && lane < rows) where.load(p.positions, p.wide_positions, own.token);
    LaterSlots later(p, end, thread);
    for (int i = 0; i < ahead; ++i)
      if (i < rows) ring[i].copy(p, first + wave + waves * i, lane);

    table.clear(thread);
    mla::block_sync();
    asm volatile("" : "+r"(index.low), "+r"(index.high), "+r"(where.low));  // any earlier, they would be waited for
    const int slot = index.slot(p);
    if (slot >= 0) own.position = static_cast<int>(where.low);
    for (int i = 0; i < ahead; ++i) {
      const int position = Wave::from_lane(own.position, i);
      if (i < rows) ring[i].copy_angle(p, position, lane);
      mla::sm90::copies_commit();
    }
    const int place = table.enter(slot, own.token);
    if (place >= 0) own.to = Row::offset(p, slot);
    if (lane < rows) list[lane] = own;
    __syncwarp();
    LaterSlots::look_at_rest(p, table, end, thread);

    write_list(p, ring, list, rows, lane, row, [&] {
      if (later.left > 0) later.look(p, table, end);
    });
    while (later.left > 0) later.look(p, table, end);
    mla::block_sync();
    put_right(p, ring, list, place >= 0 ? table.last[place] : 0, end, lane, row);
  }

  // The memory of a warp's rows under way.
  template <class Row>
  struct Ring {
    uint32_t begin;

    MLA_DEVICE explicit Ring(int wave) {
      extern MLA_SHARED __align__(16) uint8_t rings[];
      static_assert(waves * ahead * AppendStage<Row>::bytes == 90112, "append_kv: arch.toml and native.py say so, too");
      begin = mla::sm90::shared_address(rings) + wave * ahead * AppendStage<Row>::bytes;
    }
    MLA_DEVICE AppendStage<Row> operator[](int i) const { return {begin + i * AppendStage<Row>::bytes}; }
  };

  // Writes the rows of a list, the first of which are under way, and does `between` before each.
  template <class Row, class Between>
  MLA_DEVICE static void write_list(const Params& p, const Ring<Row>& ring, const Listed* list, int rows, int lane,
                                    Row& row, Between between) {
    AppendStage<Row> stage = ring[0];
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      between();
      mla::sm90::copies_wait<ahead - 1>();
      __syncwarp();
      stage.read(p, row, lane);
      const int64_t to = list[i].to;
      if (to >= 0) row.store(p, to, lane);
      __syncwarp();
      if (i + ahead < rows) {
        stage.copy(p, list[i + ahead].token, lane);
        stage.copy_angle(p, list[i + ahead].position, lane);
      }
      mla::sm90::copies_commit();
      stage.at = stage.at == ring[ahead - 1].at ? ring.begin : stage.at + AppendStage<Row>::bytes;
    }
  }

  // Over each row whose slot a later workgroup's token has, writes the row of the last of these.
  template <class Row>
  MLA_DEVICE static void put_right(const Params& p, const Ring<Row>& ring, Listed* list, int last, int end, int lane,
                                   Row& row) {
    const unsigned wrong = __ballot_sync(~0u, last >= end);
    const int rows = __popc(wrong);
    if (rows == 0) return;
    Listed right{0, last, 0};
    if (last >= end) {
      right.to = list[lane].to;
      if (Row::rotated) right.position = static_cast<int>(RawIndex::at(p.positions, p.wide_positions, last).low);
    }
    __syncwarp();
    if (last >= end) list[__popc(wrong & ((1u << lane) - 1))] = right;
    __syncwarp();
    for (int i = 0; i < ahead; ++i) {
      if (i < rows) {
        ring[i].copy(p, list[i].token, lane);
        ring[i].copy_angle(p, list[i].position, lane);
      }
      mla::sm90::copies_commit();
    }
    write_list(p, ring, list, rows, lane, row, [] {});
  }
};

}  // namespace sm_90
