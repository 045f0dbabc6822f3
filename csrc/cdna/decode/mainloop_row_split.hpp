// The mainloop for 32 to 128 rows: the waves share stages of keys in LDS and split the query rows, one or two 16-row
// tiles to a wave. No softmax state crosses a wave; one barrier per stage publishes a landed one and frees the one
// before it.
//
// Where values change their type on the way, up to 64 rows are split in two ways: two waves over rows, two over the
// keys of a stage. Each conversion and each LDS read then serves two row tiles; the results are merged when the work
// tile ends.
//
// How a stage is read and multiplied depends on the matrix instruction. It is the matter of `Fragments`, the class
// RowSplitFragments of a folder mfma_*: the types of the operands, `scores`, `multiply_values`, where O lies in a lane,
// and three choices that registers and modelled clocks make on each arch:
//   enters_early          the barrier of the next stage stands where the last values of this one were read
//   rescales_tiles_alone  a row tile is rescaled only if one of its own rows asks for it, not with the wave's other one
//   keeps_targets         what follows from the lane number for queries and targets stays in registers
#pragma once

#include "cdna/common/lds_copy.hpp"
#include "cdna/common/score_scale.hpp"
#include "cdna/decode/merge_key_groups.hpp"
#include "cdna/decode/row_mask.hpp"
#include "cdna/decode/softmax.hpp"
#include "cdna/decode/tile_copy.hpp"
#include "common/paged_kv.hpp"

namespace cdna {

// How the waves share the row tiles: wave w has the tiles w, w + `busy`. Where LDS reads are dear, as few waves read
// keys as the busiest allows (three of four with 5 or 6 tiles: the fourth would save the others nothing).
template <class Problem, class Policy, class Mma>
struct RowPartition {
  static constexpr int key_groups = Mma::splits_keys && Problem::row_tiles <= Policy::waves ? 2 : 1;
  static constexpr int waves = Policy::waves / key_groups;  // of a key group
  static constexpr int max_tiles = (Problem::row_tiles + waves - 1) / waves;
  static constexpr int busy = Policy::spares_lds_reads ? (Problem::row_tiles + max_tiles - 1) / max_tiles : waves;
  // Waves with `max_tiles`; the other busy ones have one less.
  static constexpr int full = Problem::row_tiles - (max_tiles - 1) * busy;
  static_assert(key_groups == 1 || busy == waves, "row split: all waves take part in merging key groups");
};

template <class Problem, class Policy, class Mma, template <class, class, class, int> class Fragments, int tiles>
class RowSplitWave;

template <class Problem, class Policy, class Mma, template <class, class, class, int> class Fragments>
struct RowSplitMainloop {
  using Partition = RowPartition<Problem, Policy, Mma>;
  using Exchange = KeyGroupExchange<Policy, AccumO<Problem::latent>>;
  static constexpr int lds_bytes = Partition::key_groups > 1 ? Exchange::lds_bytes : 0;
  static constexpr bool sync_after_tile = true;
  static constexpr bool scalar_partial_row = true;

  template <int tiles>
  using Wave = RowSplitWave<Problem, Policy, Mma, Fragments, tiles>;

  template <class Kernel>
  MLA_DEVICE static void run_waves(LdsBytes lds) {
    const int wave = wave_id();
    const int in_group = wave % Partition::waves;
    if (Partition::full == Partition::waves || in_group < Partition::full) {
      Kernel::template run_wave<Wave<Partition::max_tiles>>(lds, wave);
    } else if (Partition::busy == Partition::waves || in_group < Partition::busy) {
      Kernel::template run_wave<Wave<Partition::max_tiles - 1>>(lds, wave);
    } else {
      Kernel::template run_wave<Wave<0>>(lds, wave);
    }
  }
};

// One wave's part: `tiles` 16-row tiles against every key of a work tile. A wave without rows still copies its keys.
template <class Problem, class Policy, class Mma, template <class, class, class, int> class FragmentsOf, int tiles>
class RowSplitWave {
  using Partition = RowPartition<Problem, Policy, Mma>;
  using Fragments = FragmentsOf<Problem, Mma, Partition, tiles>;
  using Pv = typename Fragments::Pv;
  using Query = typename Fragments::Query;
  using Output = typename Fragments::Output;
  using Scores = typename Fragments::Scores;
  static constexpr int stage_keys = Mma::shared_keys;
  static constexpr int key_groups = Partition::key_groups;
  static constexpr int tile_keys = stage_keys / key_groups;  // of a stage, that the wave multiplies
  static constexpr int score_tiles = tile_keys / 16;
  static constexpr int array = tiles > 0 ? tiles : 1;
  using Softmax = TileSoftmax<Policy, Pv, score_tiles>;

 public:
  MLA_DEVICE RowSplitWave(const mla::DecodeParams& p, const mla::WorkTile& tile, const mla::SequenceRows& rows,
                          int first_row, LdsBytes lds, int wave)
      : tile_(tile),
        rows_(rows),
        lane_(Lane::current()),
        wave_(of_this_tile(wave)),
        lds_(lds),
        key_group_(wave_ / Partition::waves),
        fragments_(lds, lane_),
        scale_(score_scale<typename Problem::Format>(p)) {
    fragments_.skip(key_group_ * tile_keys);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      first_row_[r] = first_row + 16 * (wave_ % Partition::waves + r * Partition::busy);
      softmax_[r].clear();
    }
  }

  // QK^T, softmax and PV over the keys of the work tile.
  template <class Producer>
  MLA_DEVICE void attend(const mla::DecodeParams& p) {
    const int count = (tile_.end_key - tile_.first_key + stage_keys - 1) / stage_keys;
    if (count <= 0) {
      clear_output();
      return;
    }
    const mla::PagedKv paged_kv(p, Problem::Format::bytes, tile_.sequence);
    Producer producer(paged_kv, tile_, p.rope_cos_sin, count, lds_, lane_, wave_);
    if (tiles > 0) whole_ = WholeTiles::of<tile_keys>(p, rows_, tile_, first_row_[0]);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      const Lane lane = Fragments::keeps_targets ? lane_ : lane_.rematerialized();
      query_[r] = Query::load(p, rows_, first_row_[r], lane);
      mask_[r] = RowMask::of(p, rows_, tile_, whole_.first, first_row_[r], lane);
    }
    clear_output();
    wait_all_loads();

    decltype(Producer::next_stage(0)) filled = 0, used = 0;  // stages that the next tile is copied to and read from
    for (int n = 0; n < min(Producer::prefetch, count); ++n) {
      producer.copy(n, filled);
      filled = Producer::next_stage(filled);
    }
    int position = tile_.first_key + key_group_ * tile_keys - whole_.first;
    typename Fragments::Keys keys;
    // Publishes the wave's part of a tile, and begins to read the tile.
    const auto enter = [&] {
      mla::block_sync();
      fragments_.enter(used, keys);
    };
    constexpr bool early = Fragments::enters_early;
    int n = 0;
    if (early) {
      producer.wait(0, used);
      enter();
    }
    for (; Producer::in_parts && n + Producer::prefetch < count; ++n) {
      if (!early) {
        producer.wait(n, used);
        enter();
      }
      accumulate(used, keys, position, TileCopy<Producer>{producer, n + Producer::prefetch, filled}, [&] {
        if constexpr (early) {
          used = Producer::next_stage(used);
          producer.wait_in_flight(used);
          enter();
        }
      });
      filled = Producer::next_stage(filled);
      if (!early) used = Producer::next_stage(used);
      position += stage_keys;
      end_turn();
    }
    for (; n < count; ++n) {
      if (!early) {
        producer.wait(n, used);
        enter();
      }
      if (!Producer::in_parts && n + Producer::prefetch < count) producer.copy(n + Producer::prefetch, filled);
      filled = Producer::next_stage(filled);
      accumulate(used, keys, position, NoCopy(), [&] {
        if constexpr (early) {
          if (n + 1 == count) return;
          used = Producer::next_stage(used);
          producer.wait(n + 1, used);
          enter();
        }
      });
      if (!early) used = Producer::next_stage(used);
      position += stage_keys;
      if (!early) end_turn();
    }
  }

  // Makes each row's sums one, and one of the key groups' results.
  MLA_DEVICE void finish() {
    const Lane lane = lane_.rematerialized();
#pragma unroll
    for (int r = 0; r < tiles; ++r) softmax_[r].join(lane);
    if constexpr (key_groups > 1 && tiles > 0) {
      merge_key_groups<Policy, tiles>(lds_, wave_, key_group_, Partition::waves, lane, softmax_, output_);
    }
  }

  template <class Epilogue>
  MLA_DEVICE void store(const mla::DecodeParams& p) {
    const Lane once = Fragments::keeps_targets ? lane_.rematerialized() : lane_;
    const float value_scale = Epilogue::value_scale(p);
    const Epilogue kept[2] = {Epilogue(p, tile_, rows_, first_row_[0] + once.column),
                              Epilogue(p, tile_, rows_, first_row_[array - 1] + once.column)};
    const auto lane_of_target = [&] { return Fragments::keeps_targets ? once : lane_.rematerialized(); };
    const auto target_of = [&](int r, const Lane& lane) {
      return Fragments::keeps_targets ? kept[r] : Epilogue(p, tile_, rows_, first_row_[r] + lane.column);
    };
    float scale[array], lse[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      const Epilogue target = target_of(r, lane_of_target());
      const float sum = softmax_[r].sum;
      const mla::RowResult<Policy> result = target.finish(softmax_[r].max, sum);
      lse[r] = opaque(result.lse);
      scale[r] = Policy::factor(opaque(Softmax::output_scale(result.scale, sum, softmax_[r].divisor()) * value_scale));
    }
    // A load from here on would wait for the stores before it.
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      if (key_groups > 1 && key_group_ != r) continue;
      const Lane lane = lane_of_target();
      const Epilogue target = target_of(r, lane);
      if (lane.group == 0) target.store_lse(lse[r]);
      constexpr int run = Fragments::run;
      target.template store<run, Output::tiles * 4 / run>([&](int i, mla::Vec<float, run>& values) {
        Fragments::take_run(output_[r], i);
#pragma unroll
        for (int n = 0; n < run; ++n) values[n] = Fragments::element(output_[r], i, n) * scale[r];
        return Fragments::first_column(i, lane);
      });
    }
  }

 private:
  MLA_DEVICE void clear_output() {
#pragma unroll
    for (int r = 0; r < tiles; ++r) output_[r].clear();
  }

  // QK^T, softmax and PV of the tile at `stage` in LDS whose first key has `position`, counted from whole_.first, and
  // whose first keys are read. Another tile is copied meanwhile. Calls `leave` when the stage was read.
  template <class Stage, class Copy, class Leave>
  MLA_DEVICE void accumulate(Stage stage, typename Fragments::Keys& keys, int position, const Copy& copy,
                             const Leave& leave) {
    if (tiles == 0) {
      copy.whole();
      leave();
      return;
    }
    Scores s[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r)
#pragma unroll
      for (int T = 0; T < score_tiles; ++T) s[r][T] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    fragments_.scores(stage, keys, query_, s, copy);
    typename Fragments::Values values;
    fragments_.begin_values(stage, values);
    if (__builtin_expect(!whole_.begins_one(position), false)) {
      const int of_lane = position + 4 * lane_.rematerialized().group;
#pragma unroll
      for (int r = 0; r < tiles; ++r) mask_[r].template apply<score_tiles>(s[r], of_lane);
    }
    rescale(s);
    typename Softmax::P p[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) Softmax::compute_p(s[r], scale_, softmax_[r], p[r]);
    fragments_.multiply_values(stage, values, p, output_, leave);
  }

  // Raises the running max of rows that a score exceeds by more than the threshold of the lazy rescale.
  MLA_DEVICE void rescale(const Scores (&s)[array]) {
    bool exceeded[array], any = false;
    float largest[array];
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      largest[r] = lane_max(s[r]);
      exceeded[r] = Softmax::exceeds(softmax_[r], largest[r] * scale_);
      any |= exceeded[r];
    }
    if (__builtin_expect(any_lane(any), false)) {
#pragma unroll
      for (int r = 0; r < tiles; ++r) {
        if (Fragments::rescales_tiles_alone && tiles > 1 && !any_lane(exceeded[r])) continue;
        const float alpha = Softmax::raise_max(softmax_[r], largest[r], scale_, lane_.rematerialized());
        if (r == 1) {
          output_[r].template scale<Fragments::in_vgpr>(alpha);
        } else {
          output_[r].scale(alpha);
        }
      }
    }
  }

  // Returns the wave as a new value: with key groups, P in fp8 or rotated keys LLVM 22 would keep what follows from it
  // for the next work tiles, in more scalar registers than there are.
  MLA_DEVICE static int of_this_tile(int wave) {
    if constexpr (key_groups > 1 || Pv::normalizes_by_rounded_sum || Problem::rotate) asm volatile("" : "+s"(wave));
    return wave;
  }

  // This is a member because LLVM 22 compiles 32, 48, 80 and 96 rows otherwise with a function of the namespace.
  MLA_DEVICE static int min(int a, int b) { return a < b ? a : b; }

  const mla::WorkTile tile_;
  const mla::SequenceRows rows_;
  const Lane lane_;
  const int wave_;
  const LdsBytes lds_;
  const int key_group_;
  Fragments fragments_;
  const float scale_;
  WholeTiles whole_ = {};
  int first_row_[array];
  RowMask mask_[array];
  typename Softmax::Row softmax_[array];
  Query query_[array];
  Output output_[array];
};

}  // namespace cdna
