// cp.async: copies of 4 to 16 bytes from global to shared memory, by the threads, without registers. They are
// generic-proxy writes: a warp that reads them by wgmma calls fence_proxy_async() first.
#pragma once

#include "common/device.hpp"

namespace mla::sm_90 {

// Copies 16 bytes, or writes zeros and reads nothing when `valid` is false. L2 fetches 256 bytes around the address.
MLA_DEVICE void cp_async_16_l2_256(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// Copies BYTES (16, 8 or 4), or writes zeros and reads nothing when `valid` is false.
template <int BYTES>
MLA_DEVICE void cp_async_zfill(uint32_t to, uint64_t from, bool valid) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(valid ? BYTES : 0)
                 : "memory");
}

// Copies 16 bytes from FROM bytes behind `from` to TO bytes behind `to`, or writes zeros. Offsets that the instruction
// itself holds cost no additions.
template <int TO, int FROM>
MLA_DEVICE void cp_async_16_zfill_at(uint32_t to, uint64_t from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0),
               "n"(TO), "n"(FROM)
               : "memory");
}

// cp_async_zfill as a predicated instruction: lanes with `active` false neither copy nor write zeros, and no branch is made.
template <int BYTES>
MLA_DEVICE void cp_async_zfill_if(bool active, uint32_t to, uint64_t from, bool valid) {
  if constexpr (BYTES == 16)
    asm volatile(
        "{\n.reg .pred any;\nsetp.ne.b32 any, %3, 0;\n@any cp.async.cg.shared.global [%0], [%1], 16, %2;\n}\n" ::"r"(
            to),
        "l"(from), "r"(valid ? 16 : 0), "r"(static_cast<int>(active))
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred any;\nsetp.ne.b32 any, %4, 0;\n@any cp.async.ca.shared.global [%0], [%1], %2, %3;\n}\n" ::"r"(
            to),
        "l"(from), "n"(BYTES), "r"(valid ? BYTES : 0), "r"(static_cast<int>(active))
        : "memory");
}

// Closes a group of this thread's copies, and waits until at most PENDING groups are outstanding.
MLA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
MLA_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// This thread arrives on the mbarrier once all its copies so far have landed.
MLA_DEVICE void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace mla::sm_90
