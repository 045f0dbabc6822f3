// The epilogue of dense decode: where one finished row goes, and what its values are multiplied by on the way.
#pragma once

#include "cdna/common/score_scale.hpp"
#include "common/epilogue.hpp"
#include "common/kv_format.hpp"

namespace cdna {

// The target of one query row: out and lse when the work tile is its sequence's only split, else one row of the
// partial results. `finish` gives the row's scale and lse, `store` writes its values.
template <class Problem, class Policy>
struct DecodeEpilogue : mla::RowSink<Policy, typename Problem::Element, Problem::latent> {
  MLA_DEVICE DecodeEpilogue(const mla::DecodeParams& p, const mla::WorkTile& tile, const mla::SequenceRows& rows,
                            int row)
      : mla::RowSink<Policy, typename Problem::Element, Problem::latent>(p, tile, rows, row) {}

  // The factor of the averaged stored values: the descale of the cache, where the format has one.
  MLA_DEVICE static float value_scale(const mla::DecodeParams& p) {
    return Problem::Format::descaled ? Descale::read(p.kv_descale, p.q).value() : 1.0f;
  }
};

}  // namespace cdna
