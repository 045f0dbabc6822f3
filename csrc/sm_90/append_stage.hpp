// A bf16 row on its way through shared memory. Copies, unlike loads to registers, are waited for in groups, one by one:
// of loads that outlive a turn of a loop the compiler waits for all.
#pragma once

#include "sm_90/append_row.hpp"
#include "sm_90/mbarrier.hpp"
#include "sm_90/shared_copies.hpp"

namespace sm_90 {

// What its warp has of shared memory for a row: from each lane 16 bytes of latents twice, two rope values, and two
// values of cos_sin.
template <class Row>
struct AppendStage {
  using Params = mla::AppendKvParams;
  static constexpr uint32_t rope_at = 1024, angle_at = 1152, bytes = 1408;

  uint32_t at;

  // Predicates instead of branches: in each block with such a copy the compiler waits for what was read before.
  MLA_DEVICE void copy(const Params& p, int token, int lane) const {
    const uint64_t latents = reinterpret_cast<uint64_t>(p.kv_c) + lane * 16 + of_row(token, p.kv_c_stride * 2);
    for (int i = 0; i < 2; ++i)
      mla::sm90::copy_present<16>(lane * 8 + 256 * i < p.latent, at + lane * 16 + 512 * i, latents + 512 * i, true);
    const uint64_t ropes = reinterpret_cast<uint64_t>(p.k_pe) + lane * 4 + of_row(token, p.k_pe_stride * 2);
    mla::sm90::copy_present<4>(2 * lane < p.rope, at + rope_at + lane * 4, ropes, true);
  }

  // Apart from the rest, for it needs the token's position.
  MLA_DEVICE void copy_angle(const Params& p, uint32_t position, int lane) const {
    constexpr int each = 2 * Row::angle_bytes;
    if constexpr (Row::rotated) {
      const uint64_t from =
          reinterpret_cast<uint64_t>(p.cos_sin) + lane * each + of_row(position, p.cos_sin_stride * Row::angle_bytes);
      mla::sm90::copy_present<each>(2 * lane < p.rope, at + angle_at + lane * each, from, true);
    }
  }

  // What lies here, as the row's registers.
  MLA_DEVICE void read(const Params& p, Row& row, int lane) const {
    for (int i = 0; i < 2; ++i) mla::sm90::load16(at + lane * 16 + 512 * i, row.latent[i].data);
    const RopePair pair(p, lane);
    row.low = load2(at + rope_at + pair.first);
    row.high = load2(at + rope_at + pair.first + pair.apart);
    const uint32_t cos = at + angle_at + lane * Row::angle_bytes, sin = cos + p.rope / 2 * Row::angle_bytes;
    if constexpr (Row::angle_bytes == 4) {
      row.cos = load4(cos);
      row.sin = load4(sin);
    } else if constexpr (Row::angle_bytes == 2) {
      row.cos = load2(cos);
      row.sin = load2(sin);
    }
  }

 private:
  // Strides fit: AppendRowFits.
  MLA_DEVICE static uint64_t of_row(uint32_t row, int64_t stride) {
    return static_cast<uint64_t>(row) * static_cast<uint32_t>(stride);
  }

  MLA_DEVICE static uint32_t load4(uint32_t from) {
    uint32_t to;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
    return to;
  }
  MLA_DEVICE static uint32_t load2(uint32_t from) {
    uint16_t to;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(to) : "r"(from) : "memory");
    return to;
  }
};

}  // namespace sm_90
