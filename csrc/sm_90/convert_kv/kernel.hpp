// convert_kv: a warp converts eight tokens, or four, from the record of one cache to that of another.
//
// A lane takes a unit of 16 values: all that share a scale are in one pass of the warp, since the first 512 values of a
// row are one, and no row of records is longer but by a rope field. What is left of a warp's rows behind their whole
// passes shares passes of its own. Units come through shared memory, so that the next are under way while one is decoded.
#pragma once

#include <type_traits>

#include "common/division.hpp"
#include "sm_90/convert_kv/store.hpp"
#include "sm_90/ptx/cp_async.hpp"

namespace mla::sm_90 {

template <class From, class To>
struct ConvertKv {
  using Params = mla::ConvertKvParams;
  static constexpr int waves = 4;
  static constexpr int threads = 32 * waves;
  // Between rows of 16-bit values and of e4m3 a warp goes through all passes without a break, and has half of the tokens
  // (V8 of PERF.md).
  template <class Wide, class Narrow>
  static constexpr bool halves = Wide::WORDS == 8 && std::is_same_v<Narrow, stored::e4m3>;
  static constexpr bool streams = halves<From, To> || halves<To, From>;
  static constexpr int tokens = streams ? 4 : 8;  // of a warp; archs/sm_90/convert_kv.py knows it
  static constexpr uint32_t unit_bytes = From::WORDS * 4;  // of the latent field
  // Turns of a warp under way; with few of them more warps fit, whose instructions hide each other (V3 of PERF.md).
  static constexpr int depth = unit_bytes < 16 ? 8 : unit_bytes > 32 ? 4 : 2;
  static constexpr int min_waves = depth == 2 ? 8 : 6;

  MLA_DEVICE static void run(const Params& p) {
    Wave::wait_for_producer();
    Wave::release_consumer();
    const int lane = mla::thread_id() % 32;
    const int warp = Wave::uniform(mla::block_id_x() * waves + mla::thread_id() / 32);
    MLA_SHARED __align__(16) uint8_t memory[waves * depth * ring_bytes];
    if (warp * tokens >= p.tokens) return;
    const uint32_t ring = smem_address(memory) + mla::thread_id() / 32 * (depth * ring_bytes);
    const ConvertKv own(p, warp * tokens + lane % tokens, ring, lane);
    if constexpr (streams) return own.stream(p);
#pragma unroll 1
    for (int part = 0; part < p.parts; ++part) own.convert(p, own.task_of(p, part));
  }

 private:
  // What a lane converts: a unit of the rows of tokens first, first + step, .., one a turn.
  struct Task {
    int unit, first, step;
    int scale_words;  // of a token, where the lanes have one
    bool paired;
  };
  MLA_DEVICE Task task_of(const Params& p, int part) const {
    Task task{part * 32 + lane, 0, 1, p.place[0].scale_words, true};
    if (part == p.whole) {
      // Lanes without a unit have a token that is none.
      const int number = static_cast<int>(static_cast<uint32_t>(lane) / static_cast<uint32_t>(p.rest));
      task.unit -= number * p.rest;
      task.first = number < p.rest_tokens ? number : tokens;
      task.step = p.rest_tokens;
      task.scale_words = 0;
      task.paired = p.rest % 2 == 0;
    }
    return task;
  }

  // Where that lies in a page, and how far tokens' scales are apart.
  struct Column {
    int at, stride, scale_stride;
  };
  // A turn in shared memory: the units of 32 lanes, second halves of bf16 units beside smaller ones, a token's scales.
  static constexpr uint32_t half_at = 32 * unit_bytes, scales_at = half_at + (From::MIXED ? 512 : 0);
  static constexpr uint32_t ring_bytes = scales_at + 32;

  // Each lane knows one of the tokens, lane % tokens: the bytes before its pages, or -1 where nothing is copied, and its
  // places there.
  int64_t from_page, to_page;
  int from_token, to_token;
  uint32_t ring;
  int lane;

  MLA_DEVICE ConvertKv(const Params& p, int token, uint32_t ring_, int lane_) : ring(ring_), lane(lane_) {
    int64_t from = -1, to = -1;
    if (token < p.tokens) {
      from = index_at(p.source_slots, p.wide_source, token);
      to = index_at(p.destination_slots, p.wide_destination, token);
    }
    const bool any = from >= 0 && from < p.place[0].slots && to >= 0 && to < p.place[1].slots;
    find(p.place[0], any ? static_cast<int>(from) : 0, from_page, from_token);
    find(p.place[1], any ? static_cast<int>(to) : 0, to_page, to_token);
    if (!any) from_page = to_page = -1;
  }

  MLA_DEVICE static int64_t index_at(const void* slots, int wide, int64_t at) {
    return wide != 0 ? static_cast<const int64_t*>(slots)[at] : static_cast<const int32_t*>(slots)[at];
  }

  MLA_DEVICE static void find(const KvPlace& place, int slot, int64_t& page, int& token) {
    const uint32_t number = mla::divided(static_cast<uint32_t>(slot), place.page_reciprocal, place.page_shift);
    page = number * place.block_bytes;
    token = slot - static_cast<int>(number) * place.page;
  }

  // A unit whose elements take `words` if it is of the latent field.
  template <int words>
  MLA_DEVICE static Column column(const KvPlace& place, int unit) {
    if (unit < place.latent_units)
      return {place.latent_base + unit * words * 4, place.latent_stride, place.scale_stride};
    return {place.rope_base + (unit - place.latent_units) * 32, place.rope_stride, place.scale_stride};
  }

  MLA_DEVICE void convert(const Params& p, const Task& task) const {
    const Column from = column<From::WORDS>(p.place[0], task.unit), to = column<To::WORDS>(p.place[1], task.unit);
#pragma unroll 4
    for (int turn = 0; turn < depth; ++turn) copy(p, task, from, turn, turn);
#pragma unroll 1
    for (int turn = 0; turn * task.step < tokens; ++turn) {
      cp_async_wait<depth - 1>();
      __syncwarp();
      write(p, task, to, turn, turn);
      __syncwarp();
      if constexpr (depth < tokens) copy(p, task, from, turn + depth, turn + depth);
      else cp_async_commit();  // an empty group keeps the count
    }
    cp_async_wait<0>();
  }

  // A turn of all that a warp has.
  template <int side>
  struct Stream {
    int part = -1, turn = 0, count = 0;
    Task task{0, 0, tokens};
    Column column;

    MLA_DEVICE void next(const Params& p, const ConvertKv& own) {
      ++count;
      if (++turn * task.step < tokens) return;
      turn = 0;
      if (++part >= p.parts) return;
      task = own.task_of(p, part);
      column = own.template column<side == 0 ? From::WORDS : To::WORDS>(p.place[side], task.unit);
    }
  };

  MLA_DEVICE void stream(const Params& p) const {
    Stream<0> from;
    Stream<1> to;
    from.next(p, *this);
    to.next(p, *this);
    const auto copy_next = [&] {
      if (from.part >= p.parts) return cp_async_commit();
      copy(p, from.task, from.column, from.turn, from.count);
      from.next(p, *this);
    };
#pragma unroll 1
    for (int i = 0; i < depth; ++i) copy_next();
#pragma unroll 1
    while (to.part < p.parts) {
      cp_async_wait<depth - 1>();
      __syncwarp();
      write(p, to.task, to.column, to.turn, to.count);
      to.next(p, *this);
      __syncwarp();
      copy_next();
    }
  }

  // Copies a turn's units to its place in the ring, the `count`-th, as a group. Of several times 16 bytes neighbouring
  // lanes share the copies, so that each instruction reads whole sectors.
  MLA_DEVICE void copy(const Params& p, const Task& task, const Column& column, int turn, int count) const {
    const int number = task.first + turn * task.step;
    const int64_t page = __shfl_sync(~0u, from_page, number);
    const int token = __shfl_sync(~0u, from_token, number);
    const bool any = number < tokens && page >= 0;
    const uint32_t place = ring + count % depth * ring_bytes;
    const uint64_t block = reinterpret_cast<uint64_t>(p.source) + page;
    const uint64_t row = block + (column.at + token * column.stride);
    constexpr int width = unit_bytes < 16 ? unit_bytes : 16;
    const int behind = task.paired && lane % 2 != 0 ? 16 - static_cast<int>(unit_bytes) : 0;
#pragma unroll
    for (int i = 0; i < static_cast<int>(unit_bytes) / width; ++i) {
      const int at = unit_bytes > 16 ? behind + (task.paired ? 32 : 16) * i : 0;
      cp_async_zfill_if<width>(any, place + lane * unit_bytes + at, row + at, true);
    }
    if constexpr (From::MIXED)
      cp_async_zfill_if<16>(any && task.unit >= p.place[0].latent_units, place + half_at + lane * 16, row + 16, true);
    if constexpr (From::SCALED) {
      const uint64_t scales = block + (p.place[0].scale_base + token * column.scale_stride) + lane * 4;
      cp_async_zfill_if<4>(any && lane < task.scale_words, place + scales_at + lane * 4, scales, true);
    }
    cp_async_commit();
  }

  MLA_DEVICE void load(const Params& p, const Task& task, uint32_t place, Unit& unit) const {
    constexpr int count = From::MIXED ? 8 : From::WORDS, step = From::WORDS < 4 ? 2 : 4;
    uint32_t words[count];
    const uint32_t at = place + lane * unit_bytes;
#pragma unroll
    for (int i = 0; i < From::WORDS; i += step) {
      if constexpr (step == 2) ld_shared_v2(at, reinterpret_cast<uint32_t(&)[2]>(words[i]));
      else ld_shared_v4(at + 4 * i, reinterpret_cast<uint32_t(&)[4]>(words[i]));
    }
    unit.factor = 1.0f;
    if constexpr (From::MIXED)
      if (task.unit >= p.place[0].latent_units) {
        ld_shared_v4(place + half_at + lane * 16, reinterpret_cast<uint32_t(&)[4]>(words[4]));
        return decode_pairs<bf16>(words, unit);
      }
    From::decode(words, unit);
    if constexpr (From::SCALED) {
      const uint32_t scales = place + scales_at, scale = task.unit >> p.place[0].scale_shift;
      uint32_t stored = 0;
      if (p.place[0].scale_bytes == 1) stored = ld_shared_u8(scales + scale);
      if (p.place[0].scale_bytes == 4) stored = ld_shared<uint32_t>(scales + 4 * scale);
      unit.factor = From::scale(p.place[0], stored, p.source_descale);
    }
  }

  MLA_DEVICE void write(const Params& p, const Task& task, const Column& column, int turn, int count) const {
    const int number = task.first + turn * task.step;
    const int64_t page = __shfl_sync(~0u, to_page, number);
    const int token = __shfl_sync(~0u, to_token, number);
    Unit unit;
    load(p, task, ring + count % depth * ring_bytes, unit);
    uint8_t* block = p.destination + page;
    const Target to{block + (column.at + token * column.stride),
                    block + (p.place[1].scale_base + token * column.scale_stride),
                    task.unit,
                    task.unit < p.place[1].latent_units,
                    number < tokens && page >= 0,
                    task.paired};
    store_unit(To(), p, to, unit);
  }
};

}  // namespace mla::sm_90
