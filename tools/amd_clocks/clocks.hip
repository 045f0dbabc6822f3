// Loops whose time per iteration is one constant of the model of time; tools/measure_amd.py runs them.
#include "cdna/common/cross_lane.hpp"
#include "cdna/common/lds.hpp"

struct Params {
  const char* from;  // words that a loop follows or reads; a pointer chase ends where it began
  uint32_t* out;     // [1]
  int32_t iterations;
};

#define ITERATE _Pragma("unroll 1") for (int i = 0; i < p.iterations; ++i)

// Dependent loads: each brings the address of the next.
MLA_KERNEL(64, 1) void chase(Params p) {
  const char* at = p.from;
  ITERATE asm volatile("global_load_dwordx2 %0, %0, off\n\ts_waitcnt vmcnt(0)" : "+v"(at));
  *p.out = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at));
}
MLA_KERNEL(64, 1) void scalar_chase(Params p) {
  const char* at = p.from;
  ITERATE asm volatile("s_load_dwordx2 %0, %0, 0x0\n\ts_waitcnt lgkmcnt(0)" : "+s"(at));
  *p.out = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at));
}

// A workgroup streams 16 KiB in each iteration.
MLA_KERNEL(256, 1) void stream(Params p) {
  const char* at = p.from + (static_cast<int64_t>(mla::block_id_x()) * p.iterations * 16384 + mla::thread_id() * 16);
  typedef uint32_t Four __attribute__((ext_vector_type(4)));
  Four a, b, c, d;
  ITERATE {
    asm volatile(
        "global_load_dwordx4 %0, %4, off\n\tglobal_load_dwordx4 %1, %5, off\n\t"
        "global_load_dwordx4 %2, %6, off\n\tglobal_load_dwordx4 %3, %7, off\n\ts_waitcnt vmcnt(4)"
        : "=&v"(a), "=&v"(b), "=&v"(c), "=&v"(d)
        : "v"(at), "v"(at + 4096), "v"(at + 8192), "v"(at + 12288));
    at += 16384;
  }
  asm volatile("s_waitcnt vmcnt(0)");
}

// Each of four waves has 1 KiB loaded straight to the LDS in each iteration, up to 48 loads behind.
MLA_KERNEL(256, 1) void lds_direct(Params p) {
  MLA_SHARED char memory[4096];
  const auto lds = static_cast<uint32_t>(reinterpret_cast<uintptr_t>((MLA_LDS char*)memory)) + cdna::wave_id() * 1024;
  const char* at = p.from + mla::thread_id() % 64 * 4;
  ITERATE asm volatile(
      "s_nop 0\n\tglobal_load_lds_dword %0, off\n\tglobal_load_lds_dword %0, off offset:256\n\t"
      "global_load_lds_dword %0, off offset:512\n\tglobal_load_lds_dword %0, off offset:768\n\ts_waitcnt vmcnt(48)"
      :
      : "v"(at), "{m0}"(lds)
      : "memory");
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
}

// Each of four waves reads 4 KiB of the LDS, without conflicts, in each iteration.
MLA_KERNEL(256, 1) void lds_read(Params p) {
  MLA_SHARED char lds[16384];
  typedef uint32_t Four __attribute__((ext_vector_type(4)));
  Four a, b, c, d;
  const auto at = static_cast<uint32_t>(reinterpret_cast<uintptr_t>((MLA_LDS char*)lds)) + mla::thread_id() * 16;
  asm volatile(
      "ds_write_b128 %0, %1\n\tds_write_b128 %0, %1 offset:4096\n\tds_write_b128 %0, %1 offset:8192\n\t"
      "ds_write_b128 %0, %1 offset:12288\n\ts_waitcnt lgkmcnt(0)"
      :
      : "v"(at), "v"(Four{0, 0, 0, 0}));
  ITERATE asm volatile(
      "ds_read_b128 %0, %4\n\tds_read_b128 %1, %4 offset:4096\n\tds_read_b128 %2, %4 offset:8192\n\t"
      "ds_read_b128 %3, %4 offset:12288\n\ts_waitcnt lgkmcnt(8)" : "=&v"(a),
      "=&v"(b), "=&v"(c), "=&v"(d) : "v"(at));
  asm volatile("s_waitcnt lgkmcnt(0)");
}

MLA_KERNEL(256, 1) void barrier(Params p) { ITERATE asm volatile("s_barrier"); }
MLA_KERNEL(64, 1) void branch(Params p) { ITERATE asm volatile(""); }
