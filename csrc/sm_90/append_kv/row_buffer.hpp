// A bf16 row on its way through shared memory. cp.async groups can be waited for one by one; for loads to registers
// that outlive a turn of a loop, the compiler waits for all of them.
#pragma once

#include "sm_90/append_kv/row.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/cp_async.hpp"

namespace mla::sm_90 {

// A warp's shared memory for one row: for each lane twice 16 bytes of latents, two rope values where the row wants them,
// and two values of cos_sin.
template <class Row>
struct RowBuffer {
  static constexpr uint32_t angle_at = Row::angle_at, bytes = angle_at + 256;

  uint32_t at;
};

// Copies rows to buffers. It holds where a lane's values of row 0 lie, so that a row's are one multiplication away.
template <class Row>
struct RowSource {
  using Params = mla::AppendKvParams;
  static constexpr int angle_pair = 2 * Row::angle_bytes;  // of a lane

  int lane;
  uint64_t latents, ropes, angles;

  MLA_DEVICE RowSource(const Params& p, int lane_)
      : lane(lane_),
        latents(reinterpret_cast<uint64_t>(p.kv_c) + lane * 16),
        ropes(reinterpret_cast<uint64_t>(p.k_pe) + lane * 4),
        angles(Row::rotated ? reinterpret_cast<uint64_t>(p.cos_sin) + lane * angle_pair : 0) {}

  // Keeps the members in registers, so that the compiler does not compute them anew.
  MLA_DEVICE void keep() {
    pin_registers(latents, ropes);
    if constexpr (Row::rotated) pin_registers(angles);
  }

  // Copies are predicated instead of branched around: in each basic block with a copy the compiler waits for earlier
  // reads of shared memory.
  MLA_DEVICE void copy(const Params& p, uint32_t token, RowBuffer<Row> to) const {
    const uint64_t from = of_row(latents, token, p.kv_c_stride * 2);
    for (int i = 0; i < 2; ++i)
      cp_async_zfill_if<16>(lane * 8 + 256 * i < p.latent, to.at + lane * 16 + 512 * i, from + 512 * i, true);
    cp_async_zfill_if<4>(2 * lane < p.rope, to.at + Row::rope_at(p) + lane * 4,
                         of_row(ropes, token, p.k_pe_stride * 2), true);
  }

  // Copies cosine and sine. It is separate because it needs the token's position.
  MLA_DEVICE void copy_angle(const Params& p, uint32_t position, RowBuffer<Row> to) const {
    if constexpr (Row::rotated)
      cp_async_zfill_if<angle_pair>(2 * lane < p.rope, to.at + Row::angle_at + lane * angle_pair,
                                    of_row(angles, position, p.cos_sin_stride * Row::angle_bytes), true);
  }

 private:
  // PlainRowFits has checked that strides fit 32 bits.
  MLA_DEVICE static uint64_t of_row(uint64_t first, uint32_t row, int64_t stride) {
    return row_address(first, row, static_cast<uint32_t>(stride));
  }
};

}  // namespace mla::sm_90
