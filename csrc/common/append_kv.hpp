// append_kv: rotates, quantises and writes new tokens into a paged cache of any layout. One pipeline for every arch.
//
// A workgroup writes one token, or `group` neighbours. Where a later token has the same slot, that one is written
// instead, so the workgroup first scans the later slots for duplicates of its own. With many tokens it looks each later
// slot up in a table of its own slots, because comparing all with all would take ten times as long as writing 65536
// tokens. The rows of append_row.hpp are loaded during the scan, two to a wave. Rows of other formats are written in
// pieces, each by one wave: up to 128 latent values, or those of one scale, or the rope part. `one_run` says that the whole
// row is one run of values that are scaled alike, so that rope values are in its pieces.
#pragma once

#include "common/append_row.hpp"
#include "common/division.hpp"

namespace mla {

template <class Wave, int most_tokens, bool one_run = false>
struct AppendKv {
  using Row = AppendRow<Wave, one_run>;
  // One token needs a wave for each piece of its row: at most 7 tiles and the rope part. Many tokens take all waves.
  static constexpr int waves = most_tokens == 1 ? 8 : 1024 / Wave::lanes;
  static constexpr int threads = waves * Wave::lanes;
  static constexpr int min_waves = 4;
  static constexpr int marks = 2048;                    // words of the filter, a bit for each of as many slots
  static constexpr int chains = 512;                    // of the table; neighbouring slots are in different ones
  static constexpr bool two = Wave::lanes == 32;        // a wave loads two rows ahead, else one: 36 KB of a workgroup
  static constexpr int step = two ? 2 * waves : waves;  // from a wave's row to the next in the same registers
  static constexpr int ahead = 8;                       // slots that a thread loads together
  static constexpr int piece = 128;                     // values; no layout has a longer tile
  // Values of a piece without scales. With many tokens a wave loads one piece after the other, so a piece must be large
  // enough to keep memory busy; 128 values are not.
  static constexpr int plain_piece = most_tokens == 1 ? 128 : 512;
  static_assert((chains & (chains - 1)) == 0, "append_kv: a chain's number is the low bits of a slot");

  // The workgroup's tokens by slot: heads[slot % chains] begins a chain of tokens, counted from 1, which ends with 0.
  // The filter has a bit for every slot modulo 65536, so at most one later slot in a hundred is looked up in vain.
  struct Table {
    int filter[marks];
    int heads[chains];
    int slots[most_tokens];  // -1 where nothing is to be written
    int next[most_tokens];
    int stale[most_tokens];  // 1 where a later token has the slot
  };

  // Returns the token's slot, or -1 where nothing is to be written.
  MLA_DEVICE static int slot_of(const AppendKvParams& p, int token) {
    if (token >= p.tokens) return -1;
    const int64_t slot = index_at(p.slot_mapping, p.wide_slots, token);
    return slot >= 0 && slot < p.slots ? static_cast<int>(slot) : -1;
  }

  MLA_DEVICE static void run(const AppendKvParams& p) {
    Wave::wait_for_producer();
    Wave::release_consumer();
    const int wave = Wave::uniform(thread_id() / Wave::lanes);
    const bool rows = Row::fits(p);
    if constexpr (most_tokens == 1) {
      if (rows) write_token(p, wave);
      else write_pieces_of_token(p, wave);
    } else {
      MLA_SHARED Table table;
      const int first = block_id_x() * p.group;
      const int count = p.tokens - first < p.group ? p.tokens - first : p.group;
      if (rows) write_rows(p, table, wave, first, count);
      else write_pieces(Wave::reread(p), table, wave, first, count);
    }
  }

  // Writes one token by two waves, which load it while the whole workgroup scans for its slot.
  MLA_DEVICE static void write_token(const AppendKvParams& p, int wave) {
    const int token = block_id_x(), lane = thread_id() % Wave::lanes;
    const int slot = slot_of(p, token);
    Row row;
    typename Row::Angle angle{0, 0};
    if (wave == 0) row.load_latent(p, token, lane);
    if (wave == 1) {
      row.load_rope(p, token, lane);
      if (slot >= 0) angle = row.load_angle(p, lane);
    }
    if (written_later(p, token, slot) || slot < 0) return;
    const Record record = record_of(p, slot);
    if (wave == 0) row.store_latent(Wave::reread(p), record, token, lane);
    if (wave == 1) row.store_rest(Wave::reread(p), record, angle, lane);
  }

  MLA_DEVICE static void write_pieces_of_token(const AppendKvParams& p, int wave) {
    const int token = block_id_x();
    const int slot = slot_of(p, token);
    if (written_later(p, token, slot) || slot < 0) return;
    const int length = piece_length(p), pieces = pieces_of(p, length);
    for (int i = wave; i < pieces; i += waves) write_piece(p, token, slot, i, pieces, length);
  }

  // Each wave writes every waves-th row. It loads its first two before the scan, and each other row as soon as the
  // registers of an earlier one are free.
  MLA_DEVICE static void write_rows(const AppendKvParams& p, Table& table, int wave, int first, int count) {
    const int lane = thread_id() % Wave::lanes;
    Row even, odd;
    if (wave < count) even.load(p, first + wave, lane);
    if (two && wave + waves < count) odd.load(p, first + wave + waves, lane);
    find_stale(p, table, first, count);
#pragma unroll 1
    for (int own = wave; own < count; own += step) {
      write_row(p, table, even, first, own, count, lane);
      if (two && own + waves < count) write_row(p, table, odd, first, own + waves, count, lane);
    }
  }

  MLA_DEVICE static void write_row(const AppendKvParams& p, const Table& table, Row& row, int first, int own, int count,
                                   int lane) {
    const int slot = Wave::uniform(table.stale[own] != 0 ? -1 : table.slots[own]);
    if (slot >= 0) {
      const auto angle = row.load_angle(Wave::reread(p), lane);
      const Record record = record_of(Wave::reread(p), slot);
      row.store_latent(Wave::reread(p), record, first + own, lane);
      row.store_rest(Wave::reread(p), record, angle, lane);
    }
    const int next = own + step;
    if (next < count) row.load(Wave::reread(p), first + next, lane);
  }

  MLA_DEVICE static void write_pieces(const AppendKvParams& p, Table& table, int wave, int first, int count) {
    const int length = piece_length(p), pieces = pieces_of(p, length);
    find_stale(p, table, first, count);
#pragma unroll 1
    for (int i = wave; i < count * pieces; i += waves) {
      const int own = static_cast<uint32_t>(i) / static_cast<uint32_t>(pieces);
      const int slot = Wave::uniform(table.stale[own] != 0 ? -1 : table.slots[own]);
      if (slot >= 0) write_piece(p, first + own, slot, i - own * pieces, pieces, length);
    }
  }

  MLA_DEVICE static int piece_length(const AppendKvParams& p) { return p.tile > 0 ? p.tile : plain_piece; }
  MLA_DEVICE static int pieces_of(const AppendKvParams& p, int length) {
    return (Row::length(p) + length - 1) / length + 1;  // with the rope part, or padding alone
  }

  MLA_DEVICE static Record record_of(const AppendKvParams& p, int slot) {
    const uint32_t block = divided(static_cast<uint32_t>(slot), p.page_reciprocal, p.page_shift);
    return Record{p.kv_cache + block * p.block_bytes, slot - static_cast<int>(block) * p.page, p.page};
  }

  MLA_DEVICE static void write_piece(const AppendKvParams& p, int token, int slot, int i, int pieces, int length) {
    const int lane = thread_id() % Wave::lanes;
    const Record record = record_of(p, slot);
    if (i + 1 == pieces) write_rest(Wave::reread(p), record, token, lane);
    else if (p.tile > 0) write_latent<true>(Wave::reread(p), record, token, i, length, lane);
    else write_latent<false>(Wave::reread(p), record, token, i, length, lane);
  }

  // Returns whether a later token has the slot, the same in all threads of the workgroup.
  MLA_DEVICE static bool written_later(const AppendKvParams& p, int token, int slot) {
    MLA_SHARED int found[waves];
    const int thread = thread_id();
    bool mine = false;
#pragma unroll 4
    for (int other = token + 1 + thread; other < p.tokens; other += threads)
      mine |= index_at(p.slot_mapping, p.wide_slots, other) == slot;
    const bool any = Wave::any(mine);
    if (thread % Wave::lanes == 0) found[thread / Wave::lanes] = any ? 1 : 0;
    block_sync();
    int all = 0;
    for (int w = 0; w < waves; ++w) all |= found[w];
    return all != 0;
  }

  // Fills the table of tokens first..first + count - 1.
  MLA_DEVICE static void find_stale(const AppendKvParams& p, Table& table, int first, int count) {
    const int thread = thread_id();
    uint32_t later[ahead];
    load_later(p, first + 1 + thread, later);
#pragma unroll 1
    for (int word = thread; word < marks; word += threads) table.filter[word] = 0;
    if (thread < chains) table.heads[thread] = 0;
    block_sync();
    static_assert(most_tokens <= threads && chains <= threads, "append_kv: a thread has a token and a chain");
    if (thread < count) {
      const int slot = slot_of(p, first + thread);
      table.slots[thread] = slot;
      table.stale[thread] = 0;
      if (slot >= 0) {
        table.next[thread] = Wave::exchange(&table.heads[slot % chains], thread + 1);
        Wave::set_bits(&table.filter[slot / 32 % marks], 1 << slot % 32);
      }
    }
    block_sync();
#pragma unroll 1
    for (int base = first + 1 + thread; base < p.tokens; base += ahead * threads) {
      int found = 0;
      for (int i = 0; i < ahead; ++i) {
        const uint32_t mark = static_cast<uint32_t>(table.filter[later[i] / 32 % marks]) >> later[i] % 32 & 1;
        found |= static_cast<int>(mark) << i;
      }
      load_later(p, base + ahead * threads, later);
#pragma unroll 1
      for (int other = base; found != 0; other += threads, found >>= 1)
        if ((found & 1) != 0) mark_stale(p, table, first, other);
    }
    block_sync();
  }

  // Loads the low words of the slots of a thread's next tokens together; past the last token they are 0.
  MLA_DEVICE static void load_later(const AppendKvParams& p, int base, uint32_t (&later)[ahead]) {
    const auto* words = static_cast<const uint32_t*>(p.slot_mapping);
    for (int i = 0; i < ahead; ++i) {
      const int token = base + i * threads;
      later[i] = token < p.tokens ? words[static_cast<int64_t>(token) << p.wide_slots] : 0;
    }
  }

  // Marks the workgroup's tokens before `other` that have its slot.
  MLA_DEVICE static void mark_stale(const AppendKvParams& p, Table& table, int first, int other) {
    const int slot = slot_of(p, other);
    if (slot < 0) return;
    for (int own = table.heads[slot % chains]; own != 0; own = table.next[own - 1])
      if (table.slots[own - 1] == slot && first + own - 1 < other) Wave::exchange(&table.stale[own - 1], 1);
  }

  template <bool scaled>
  MLA_DEVICE static void write_latent(const AppendKvParams& p, const Record& record, int token, int number, int length,
                                      int lane) {
    constexpr int per_lane = (scaled ? piece : plain_piece) / Wave::lanes;
    const int first = number * length;
    const int count = Row::length(p) - first < length ? Row::length(p) - first : length;
    float values[per_lane];
    if (one_run && first + count > p.latent) load_run(p, token, first, count, lane, values);
    else load_values(p, token * p.kv_c_stride + first, count, lane, values);
    if constexpr (scaled) {
      const float scale = scale_of(p, values, lane);
      uint8_t* scales = record.field(p.scale_per_block, p.scale_stride, p.scale_offset);
      if (lane == 0) store_encoded<Wave>(scales, number, p.scale_encoding, bit_cast<uint32_t>(scale));
      for (int i = 0; i < per_lane; ++i) values[i] = values[i] / scale;
    } else if (p.kv_descale != nullptr) {
      for (int i = 0; i < per_lane; ++i) values[i] = values[i] / *p.kv_descale;
    }
    uint8_t* latents = record.field(p.latent_per_block, p.latent_stride, p.latent_offset);
    if constexpr (one_run) {
      if (p.latent_encoding == ENCODED_E2M1) store_halves(latents, first, count, lane, values);
      else store_values<ENCODED_E4M3FN>(latents, first, count, lane, values);
      return;
    }
    if (p.latent_encoding == ENCODED_BF16) store_values<ENCODED_BF16>(latents, first, count, lane, values);
    else if (p.latent_encoding == ENCODED_FP16) store_values<ENCODED_FP16>(latents, first, count, lane, values);
    else if (p.latent_encoding == ENCODED_FP32) store_values<ENCODED_FP32>(latents, first, count, lane, values);
    else if (p.latent_encoding == ENCODED_E4M3FN) store_values<ENCODED_E4M3FN>(latents, first, count, lane, values);
    else store_values<ENCODED_E4M3FNUZ>(latents, first, count, lane, values);
  }

  // Loads a lane's values of a piece: every Wave::lanes-th of the `count` from `from` on, or 0. All loads are issued
  // before the first is converted, because a branch on the type between them would make each wait for the one before.
  template <int n>
  MLA_DEVICE static void load_values(const AppendKvParams& p, int64_t from, int count, int lane, float (&values)[n]) {
    if (p.in_type == ENCODED_FP32) {
      const float* row = static_cast<const float*>(p.kv_c) + from + lane;
      for (int i = 0; i < n; ++i) values[i] = lane + i * Wave::lanes < count ? row[i * Wave::lanes] : 0.0f;
      return;
    }
    const uint16_t* row = static_cast<const uint16_t*>(p.kv_c) + from + lane;
    uint32_t bits[n];
    for (int i = 0; i < n; ++i) bits[i] = lane + i * Wave::lanes < count ? row[i * Wave::lanes] : 0;
    for (int i = 0; i < n; ++i) values[i] = value_of<Wave>(bits[i], p.in_type);
  }

  // The same of values from column `first` on that are latents, rope values or both.
  template <int n>
  MLA_DEVICE static void load_run(const AppendKvParams& p, int token, int first, int count, int lane,
                                  float (&values)[n]) {
    for (int i = 0; i < n; ++i) {
      const int column = first + lane + i * Wave::lanes;
      values[i] = 0.0f;
      if (column >= first + count) continue;
      if (column < p.latent)
        values[i] = value_of<Wave>(load_bits(p.kv_c, p.in_type, token * p.kv_c_stride + column), p.in_type);
      else values[i] = rope_value(p, token, column - p.latent);
    }
  }

  // A rope value of a row of one run, rotated.
  MLA_DEVICE static float rope_value(const AppendKvParams& p, int token, int column) {
    const int64_t row = token * p.k_pe_stride;
    const float own = value_of<Wave>(load_bits(p.k_pe, p.in_type, row + column), p.in_type);
    if (p.cos_sin == nullptr) return own;
    const int half = p.rope / 2;
    const bool is_first = p.interleaved != 0 ? column % 2 == 0 : column < half;
    const int apart = p.interleaved != 0 ? 1 : half;
    const int64_t angle = index_at(p.positions, p.wide_positions, token) * p.cos_sin_stride +
                          (p.interleaved != 0 ? column / 2 : column % half);
    const int64_t other_at = row + (is_first ? column + apart : column - apart);
    const float other = value_of<Wave>(load_bits(p.k_pe, p.in_type, other_at), p.in_type);
    float a = is_first ? own : other, b = is_first ? other : own;
    rotate_fused<Wave>(a, b, value_of<Wave>(load_bits(p.cos_sin, p.angle_type, angle), p.angle_type),
                       value_of<Wave>(load_bits(p.cos_sin, p.angle_type, angle + half), p.angle_type));
    return rounded_to<Wave>(is_first ? a : b, p.in_type);
  }

  // Stores values of half a byte, two by the even one of two lanes.
  template <int n>
  MLA_DEVICE static void store_halves(uint8_t* field, int first, int count, int lane, const float (&values)[n]) {
    for (int i = 0; i < n; ++i) {
      const int column = lane + i * Wave::lanes;
      const int code = static_cast<int>(encode_e2m1(bits_of<Wave>(values[i])));
      const int next = Wave::from_lane(code, lane | 1);
      if (column < count && lane % 2 == 0) field[(first + column) / 2] = static_cast<uint8_t>(code | next << 4);
    }
  }

  template <int encoding, int n>
  MLA_DEVICE static void store_values(uint8_t* field, int first, int count, int lane, const float (&values)[n]) {
    for (int i = 0; i < n; ++i) {
      const int column = lane + i * Wave::lanes;
      if (column < count) store_encoded<Wave>(field, first + column, encoding, bits_of<Wave>(values[i]));
    }
  }

  // Returns the scale of a tile.
  template <int count>
  MLA_DEVICE static float scale_of(const AppendKvParams& p, const float (&values)[count], int lane) {
    int largest = 0;
    for (int i = 0; i < count; ++i) {
      const int size = static_cast<int>(bits_of<Wave>(values[i]) & 0x7fffffff);
      largest = size > largest ? size : largest;
    }
    return tile_scale<Wave, one_run>(p, Wave::template max_over<Wave::lanes>(largest, lane));
  }

  // Writes the rope part, then the padding of the record.
  MLA_DEVICE static void write_rest(const AppendKvParams& p, const Record& record, int token, int lane) {
    uint8_t* ropes = record.field(p.rope_per_block, p.rope_stride, p.rope_offset);
    const int64_t row = token * p.k_pe_stride;
    const int rope = one_run ? 0 : p.rope;
    if (p.cos_sin == nullptr) {
      for (int column = lane; column < rope; column += Wave::lanes)
        write_rope(p, ropes, column, value_of<Wave>(load_bits(p.k_pe, p.in_type, row + column), p.in_type));
    } else {
      const int half = rope / 2;
      const int64_t angles = index_at(p.positions, p.wide_positions, token) * p.cos_sin_stride;
      for (int pair = lane; pair < half; pair += Wave::lanes) {
        const int low = p.interleaved != 0 ? 2 * pair : pair;
        const int high = p.interleaved != 0 ? low + 1 : low + half;
        const uint32_t a_bits = load_bits(p.k_pe, p.in_type, row + low);
        const uint32_t b_bits = load_bits(p.k_pe, p.in_type, row + high);
        const uint32_t cos_bits = load_bits(p.cos_sin, p.angle_type, angles + pair);
        const uint32_t sin_bits = load_bits(p.cos_sin, p.angle_type, angles + half + pair);
        float a = value_of<Wave>(a_bits, p.in_type), b = value_of<Wave>(b_bits, p.in_type);
        rotate<Wave>(a, b, value_of<Wave>(cos_bits, p.angle_type), value_of<Wave>(sin_bits, p.angle_type));
        write_rope(p, ropes, low, a);
        write_rope(p, ropes, high, b);
      }
    }
    uint8_t* pads = record.field(p.pad_per_block, p.pad_stride, p.pad_offset);
    for (int byte = lane; byte < p.pad; byte += Wave::lanes) pads[byte] = 0;
  }

  MLA_DEVICE static void write_rope(const AppendKvParams& p, uint8_t* ropes, int column, float value) {
    if (p.kv_descale != nullptr) value = value / *p.kv_descale;
    store_encoded<Wave>(ropes, column, p.rope_encoding, bits_of<Wave>(value));
  }
};

}  // namespace mla
