// Kernels that test_mutations.py breaks one instruction at a time. WIDTH: bytes per lane of a direct-to-LDS load.
#include "common/device.hpp"

#define LDS_POINTER __attribute__((address_space(3)))
#define GLOBAL_POINTER __attribute__((address_space(1)))

struct PipelineParams {
  const float* in;   // [tiles, 32, 32]
  float* out;        // [32, 32]: sum over tiles of tile t transposed, times t + 1
  int32_t tiles;
};
// Two buffers: the next tile is on its way from memory while this one is read; four waves each read what others wrote.
MLA_KERNEL(256, 1) void pipeline(PipelineParams p) {
  MLA_SHARED float tile[2][32][33];
  int t = mla::thread_id(), row = t / 8, column = t % 8 * 4;
  using Four = mla::Vec<float, 4>;
  const Four* in = reinterpret_cast<const Four*>(p.in) + t;
  float sum[4] = {};
  Four next = in[0];
  for (int k = 0; k < p.tiles; k++) {
    for (int i = 0; i < 4; i++) tile[k & 1][row][column + i] = next[i];
    if (k + 1 < p.tiles) next = in[(k + 1) * 256];
    mla::block_sync();
    for (int i = 0; i < 4; i++) sum[i] += static_cast<float>(k + 1) * tile[k & 1][column + i][row];
  }
  Four result = {{sum[0], sum[1], sum[2], sum[3]}};
  reinterpret_cast<Four*>(p.out)[t] = result;
}

struct SplitParams {
  const float* in;      // [rows, blocks, 256]
  float* partial;       // [rows, blocks, 256]
  float* out;           // [rows, 256]: sum over blocks of the squares
  uint32_t* arrived;    // [rows], zero before and after
  int32_t blocks;
};
// The last of a row's workgroups to arrive adds up what all of them left in memory.
MLA_KERNEL(256, 1) void split(SplitParams p) {
  MLA_SHARED uint32_t order;
  int t = mla::thread_id(), block = mla::block_id_x(), row = mla::block_id_y();
  float* partial = p.partial + row * p.blocks * 256;
  float x = p.in[(row * p.blocks + block) * 256 + t];
  partial[block * 256 + t] = x * x;
  mla::block_sync();
  if (t == 0) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    order = __hip_atomic_fetch_add(p.arrived + row, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  }
  mla::block_sync();
  if (order + 1 != static_cast<uint32_t>(p.blocks)) return;
  float sum = 0;
  for (int b = 0; b < p.blocks; b++) sum += partial[b * 256 + t];
  p.out[row * 256 + t] = sum;
  if (t == 0) __hip_atomic_store(p.arrived + row, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Without the fence's own wait for vector memory, which would wait for the younger tile too.
MLA_DEVICE void bare_barrier() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_s_barrier();
  asm volatile("" ::: "memory");
}

struct StreamParams {
  const char* in;   // [tiles, 256 * WIDTH]
  char* out;        // [tiles, 256 * WIDTH]: the lanes' pieces of each tile in reverse order
  int32_t tiles;
};
// Memory -> LDS without registers, two tiles ahead: the wait leaves the younger tile's load outstanding.
MLA_KERNEL(256, 1) void stream(StreamParams p) {
  MLA_SHARED char tile[3][256 * WIDTH];
  int t = mla::thread_id(), wave = __builtin_amdgcn_readfirstlane(t / 64);
  using Piece = mla::Vec<char, WIDTH>;
  auto fetch = [&](int k) {
    __builtin_amdgcn_global_load_lds((GLOBAL_POINTER void*)(const_cast<char*>(p.in) + (k * 256 + t) * WIDTH),
                                     (LDS_POINTER void*)(tile[k % 3] + wave * 64 * WIDTH), WIDTH, 0, 0);
  };
  fetch(0);
  fetch(1);
  for (int k = 0; k < p.tiles; k++) {
    if (k + 1 < p.tiles)
      __builtin_amdgcn_s_waitcnt(0x0f71);   // vmcnt(1)
    else
      __builtin_amdgcn_s_waitcnt(0x0f70);   // vmcnt(0)
    bare_barrier();
    Piece piece = reinterpret_cast<Piece*>(tile[k % 3])[255 - t];
    reinterpret_cast<Piece*>(p.out)[k * 256 + t] = piece;
    if (k + 2 < p.tiles) fetch(k + 2);
  }
}
