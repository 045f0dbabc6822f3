// A bf16 row on its way through shared memory. cp.async groups can be waited for one by one; for loads to registers
// that outlive a turn of a loop, the compiler waits for all of them.
#pragma once

#include "sm_90/append_kv/row.hpp"
#include "sm_90/ptx/memory.hpp"
#include "sm_90/ptx/cp_async.hpp"

namespace mla::sm_90 {

// A warp's shared memory for one row: for each lane twice 16 bytes of latents, two rope values, and two values of
// cos_sin.
template <class Row>
struct RowBuffer {
  using Params = mla::AppendKvParams;
  static constexpr uint32_t rope_at = 1024, angle_at = 1152, bytes = 1408;

  uint32_t at;

  // Copies are predicated instead of branched around: in each basic block with a copy the compiler waits for earlier
  // reads of shared memory.
  MLA_DEVICE void copy(const Params& p, int token, int lane) const {
    const uint64_t latents = reinterpret_cast<uint64_t>(p.kv_c) + lane * 16 + of_row(token, p.kv_c_stride * 2);
    for (int i = 0; i < 2; ++i)
      cp_async_zfill_if<16>(lane * 8 + 256 * i < p.latent, at + lane * 16 + 512 * i, latents + 512 * i, true);
    const uint64_t ropes = reinterpret_cast<uint64_t>(p.k_pe) + lane * 4 + of_row(token, p.k_pe_stride * 2);
    cp_async_zfill_if<4>(2 * lane < p.rope, at + rope_at + lane * 4, ropes, true);
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

  // Reads the buffer into the row's registers.
  MLA_DEVICE void read(const Params& p, Row& row, int lane) const {
    for (int i = 0; i < 2; ++i) ld_shared_v4(at + lane * 16 + 512 * i, row.latent[i].data);
    const RopePair pair(p, lane);
    row.low = ld_shared_u16(at + rope_at + pair.first);
    row.high = ld_shared_u16(at + rope_at + pair.first + pair.apart);
    const uint32_t cos = at + angle_at + lane * Row::angle_bytes, sin = cos + p.rope / 2 * Row::angle_bytes;
    if constexpr (Row::angle_bytes == 4) {
      row.cos = ld_shared<uint32_t>(cos);
      row.sin = ld_shared<uint32_t>(sin);
    } else if constexpr (Row::angle_bytes == 2) {
      row.cos = ld_shared_u16(cos);
      row.sin = ld_shared_u16(sin);
    }
  }

 private:
  // PlainRowFits has checked that strides fit 32 bits.
  MLA_DEVICE static uint64_t of_row(uint32_t row, int64_t stride) {
    return static_cast<uint64_t>(row) * static_cast<uint32_t>(stride);
  }
};

}  // namespace mla::sm_90
