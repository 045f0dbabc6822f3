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
  using Params = mla::AppendKvParams;
  static constexpr uint32_t angle_at = Row::angle_at, bytes = angle_at + 256;

  uint32_t at;

  // Copies are predicated instead of branched around: in each basic block with a copy the compiler waits for earlier
  // reads of shared memory.
  MLA_DEVICE void copy(const Params& p, int token, int lane) const {
    const uint64_t latents = reinterpret_cast<uint64_t>(p.kv_c) + lane * 16 + of_row(token, p.kv_c_stride * 2);
    for (int i = 0; i < 2; ++i)
      cp_async_zfill_if<16>(lane * 8 + 256 * i < p.latent, at + lane * 16 + 512 * i, latents + 512 * i, true);
    const uint64_t ropes = reinterpret_cast<uint64_t>(p.k_pe) + lane * 4 + of_row(token, p.k_pe_stride * 2);
    cp_async_zfill_if<4>(2 * lane < p.rope, at + Row::rope_at(p) + lane * 4, ropes, true);
  }

  // Copies cosine and sine. It is separate because it needs the token's position.
  MLA_DEVICE void copy_angle(const Params& p, uint32_t position, int lane) const {
    constexpr int each = 2 * Row::angle_bytes;
    if constexpr (Row::rotated) {
      const uint64_t from =
          reinterpret_cast<uint64_t>(p.cos_sin) + lane * each + of_row(position, p.cos_sin_stride * Row::angle_bytes);
      cp_async_zfill_if<each>(2 * lane < p.rope, at + angle_at + lane * each, from, true);
    }
  }

 private:
  // PlainRowFits has checked that strides fit 32 bits.
  MLA_DEVICE static uint64_t of_row(uint32_t row, int64_t stride) {
    return static_cast<uint64_t>(row) * static_cast<uint32_t>(stride);
  }
};

}  // namespace mla::sm_90
