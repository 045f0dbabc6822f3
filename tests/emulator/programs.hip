// Kernels that the emulator's tests run: each uses one part of the machine. K: depth of the 16x16 bf16 matrix instruction.
#include "common/device.hpp"

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef short bf16_bits __attribute__((ext_vector_type(K / 4)));
typedef __bf16 bf16_lane __attribute__((ext_vector_type(K / 4)));

struct AddParams {
  const float* a;  // [count]
  const float* b;  // [count]
  float* out;      // [count]
  int32_t count;
};
MLA_KERNEL(256, 1) void add(AddParams p) {
  int i = mla::block_id_x() * 256 + mla::thread_id();
  if (i < p.count) p.out[i] = p.a[i] + p.b[i];
}

struct TransposeParams {
  const float* in;  // [32, 32]
  float* out;       // [32, 32]
};
MLA_KERNEL(256, 1) void transpose(TransposeParams p) {
  MLA_SHARED float tile[32][33];
  for (int i = mla::thread_id(); i < 1024; i += 256) tile[i / 32][i % 32] = p.in[i];
  mla::block_sync();
  for (int i = mla::thread_id(); i < 1024; i += 256) p.out[i] = tile[i % 32][i / 32];
}

struct MatmulParams {
  const __bf16* a;  // [16, depth]
  const __bf16* b;  // [16, depth], transposed
  float* out;       // [16, 16]
  int32_t depth;
};
MLA_KERNEL(64, 1) void matmul(MatmulParams p) {
  int lane = mla::thread_id(), row = lane % 16, group = lane / 16;
  f32x4 sum = {0, 0, 0, 0};
  for (int k = 0; k < p.depth; k += K) {
    bf16_lane a = *reinterpret_cast<const bf16_lane*>(p.a + row * p.depth + k + group * (K / 4));
    bf16_lane b = *reinterpret_cast<const bf16_lane*>(p.b + row * p.depth + k + group * (K / 4));
#if K == 32
    sum = __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, sum, 0, 0, 0);
#else
    sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(mla::bit_cast<bf16_bits>(a), mla::bit_cast<bf16_bits>(b), sum, 0, 0,
                                                    0);
#endif
  }
  for (int i = 0; i < 4; i++) p.out[(group * 4 + i) * 16 + row] = sum[i];
}

struct LastParams {
  const float* in;    // [blocks, 256]
  float* partial;     // [blocks, 256]
  float* out;         // [256]: sum over blocks of twice the input
  uint32_t* arrived;  // [1], zero before and after
  int32_t blocks;
};
MLA_KERNEL(256, 1) void last_arriver(LastParams p) {
  MLA_SHARED uint32_t order;
  int t = mla::thread_id(), block = mla::block_id_x();
  p.partial[block * 256 + t] = 2 * p.in[block * 256 + t];
  mla::block_sync();
  if (t == 0) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    order = __hip_atomic_fetch_add(p.arrived, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  }
  mla::block_sync();
  if (order != static_cast<uint32_t>(p.blocks) - 1) return;
  float sum = 0;
  for (int b = 0; b < p.blocks; b++) sum += p.partial[b * 256 + t];
  p.out[t] = sum;
  if (t == 0) __hip_atomic_store(p.arrived, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

struct SpinParams {
  uint32_t* flag;  // [1]
  float* out;      // [blocks]
};
// Every workgroup but the last waits until the last one has raised the flag: later ones are waited for.
MLA_KERNEL(64, 1) void waits_for_last(SpinParams p, int32_t blocks) {
  if (mla::thread_id()) return;
  if (mla::block_id_x() == blocks - 1) {
    __hip_atomic_store(p.flag, 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
  } else {
    while (!__hip_atomic_load(p.flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT)) {
    }
  }
  p.out[mla::block_id_x()] = 1;
}

struct PrivateParams {
  uint32_t* out;  // [128]
  int32_t from;
};
// More words of each thread than there are registers or bytes of LDS for: they lie in private memory.
MLA_KERNEL(128, 1) void private_memory(PrivateParams p) {
  uint32_t words[512];
  int t = mla::thread_id();
  for (int i = 0; i < 512; i++) words[(i + p.from) % 512] = 3 * t + i;
  p.out[t] = words[t];
}
