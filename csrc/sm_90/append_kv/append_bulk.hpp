// append_kv of many tokens by a block, for rows as in row.hpp: memory is busy before anything is looked up.
//
// A block of 32 warps, one on an SM, has up to 512 neighbouring tokens, and each warp every 32nd of them. The block
// knows at once which of its own tokens have the same slot, and writes only the last of these. Whether a token of a
// later block has the slot is searched for between the rows. A row that should not have been written is corrected at
// the end: the warp that wrote it writes the row of the last token with that slot over it, each lane where it wrote
// before. So in any order of blocks, what a block writes last to a slot is the right row.
#pragma once

#include "sm_90/append_kv/dedup.hpp"
#include "sm_90/append_kv/row_buffer.hpp"

namespace mla::sm_90 {

struct AppendBulk {
  using Params = mla::AppendKvParams;
  static constexpr int waves = 32, most_tokens = 512;
  static constexpr int ahead = 2;  // rows of a warp in flight; 1, 3 and 4 are slower

  // A row to be written where `to` says, if that exists.
  template <class Place>
  struct Pending {
    Place to;
    int token, position;
  };
  template <class Place>
  struct Shared {
    LastWriters table;
    Pending<Place> rows[waves][most_tokens / waves];
  };

  MLA_DEVICE static void run(const Params& p) {
    MLA_SHARED Shared<PlainPlace> shared;
    with_row_of<PlainRow>(p, [&](auto row) { write(p, shared, row); });
  }

  template <class Row, class Place>
  MLA_DEVICE static void write(const Params& p, Shared<Place>& shared, Row row) {
    Wave::wait_for_producer();
    Wave::release_consumer();
    LastWriters& table = shared.table;
    const int thread = mla::thread_id(), lane = thread % 32;
    const int wave = Wave::uniform(thread / 32);
    const int first = mla::block_id_x() * p.group;
    const int count = p.tokens - first < p.group ? p.tokens - first : p.group;
    const int end = first + count;
    const int rows = (count - wave + waves - 1) / waves;  // of this warp
    Pending<Place>* list = shared.rows[wave];
    const RowRing<Row> ring(wave);
    RowSource<Row> source(p, lane);
    source.keep();
    row.keep();

    // Lane i loads slot and position of the warp's i-th token.
    Pending<Place> own{Place{}, first + wave + waves * lane, 0};
    RawIndex index, where;
    if (lane < rows) index.load(p.slot_mapping, p.wide_slots, own.token);
    if (Row::rotated && lane < rows) where.load(p.positions, p.wide_positions, own.token);
    LaterDuplicateScan later(p, end, thread);
    for (int i = 0; i < ahead; ++i)
      if (i < rows) source.copy(p, first + wave + waves * i, ring[i]);

    table.clear(thread);
    mla::block_sync();
    pin_registers(index.low, index.high, where.low);  // or they are waited for
    const int slot = index.slot(p);
    if (slot >= 0) own.position = static_cast<int>(where.low);
    for (int i = 0; i < ahead; ++i) {
      const int position = Wave::from_lane(own.position, i);
      if (i < rows) source.copy_angle(p, position, ring[i]);
      cp_async_commit();
    }
    const int entry = table.enter(slot, own.token);
    if (entry >= 0) own.to = Row::place(p, slot);
    if (lane < rows) list[lane] = own;
    __syncwarp();
    LaterDuplicateScan::scan_rest(p, table, end, thread);

    write_list(p, source, ring, list, rows, row, [&] {
      if (later.left > 0) later.scan(p, table, end);
    });
    while (later.left > 0) later.scan(p, table, end);
    mla::block_sync();
    correct_duplicates(p, source, ring, list, entry >= 0 ? table.last[entry] : 0, end, row);
  }

  // The shared memory of a warp's rows in flight.
  template <class Row>
  struct RowRing {
    uint32_t begin;

    MLA_DEVICE explicit RowRing(int wave) {
      extern MLA_SHARED __align__(16) uint8_t rings[];
      static_assert(waves * ahead * RowBuffer<Row>::bytes <= 90112,
                    "append_kv: dynamic_lds in arch.toml and BULK_BYTES in archs/sm_90 say as many");
      begin = smem_address(rings) + wave * ahead * RowBuffer<Row>::bytes;
    }
    MLA_DEVICE RowBuffer<Row> operator[](int i) const { return {begin + i * RowBuffer<Row>::bytes}; }
  };

  // Writes the rows of a list, the first of which are in flight, and calls `between` before each.
  template <class Row, class Place, class Between>
  MLA_DEVICE static void write_list(const Params& p, const RowSource<Row>& source, const RowRing<Row>& ring,
                                    const Pending<Place>* list, int rows, Row& row, Between between) {
    RowBuffer<Row> stage = ring[0];
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      between();
      cp_async_wait<ahead - 1>();
      __syncwarp();
      row.read(p, stage.at, source.lane);
      const Place to = list[i].to;
      if (to.exists()) row.store(p, to, source.lane);
      __syncwarp();
      if (i + ahead < rows) {
        source.copy(p, list[i + ahead].token, stage);
        source.copy_angle(p, list[i + ahead].position, stage);
      }
      cp_async_commit();
      stage.at = stage.at == ring[ahead - 1].at ? ring.begin : stage.at + RowBuffer<Row>::bytes;
    }
  }

  // Writes over each row whose slot a later block's token has the row of the last such token.
  template <class Row, class Place>
  MLA_DEVICE static void correct_duplicates(const Params& p, const RowSource<Row>& source, const RowRing<Row>& ring,
                                            Pending<Place>* list, int last, int end, Row& row) {
    const unsigned wrong = __ballot_sync(~0u, last >= end);
    const int rows = __popc(wrong);
    if (rows == 0) return;
    Pending<Place> right{Place{}, last, 0};
    if (last >= end) {
      right.to = list[source.lane].to;
      if (Row::rotated) right.position = static_cast<int>(RawIndex::at(p.positions, p.wide_positions, last).low);
    }
    __syncwarp();
    if (last >= end) list[__popc(wrong & ((1u << source.lane) - 1))] = right;
    __syncwarp();
    for (int i = 0; i < ahead; ++i) {
      if (i < rows) {
        source.copy(p, list[i].token, ring[i]);
        source.copy_angle(p, list[i].position, ring[i]);
      }
      cp_async_commit();
    }
    write_list(p, source, ring, list, rows, row, [] {});
  }
};

}  // namespace mla::sm_90
