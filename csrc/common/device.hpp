// The words every kernel is written in: qualifiers, launch bounds, ids, fixed-width types, vectors.
// Read by clang as HIP without any ROCm header, and by nvcc. Nothing here knows one architecture of a vendor.
#pragma once

#if defined(__CUDACC__)

#include <cstddef>
#include <cstdint>

#define MLA_CUDA 1
#define MLA_HIP 0
#define MLA_GLOBAL_ __global__
#define MLA_DEVICE __device__ __forceinline__
#define MLA_SHARED __shared__
// CUDA's second bound is blocks per SM; min_waves is warps per SM sub-core, of which an SM has four.
#define MLA_BOUNDS_(threads, min_waves) \
  __launch_bounds__(threads, ((min_waves) * 4 * 32 / (threads)) > 0 ? ((min_waves) * 4 * 32 / (threads)) : 1)

#elif defined(__HIP__) && defined(__clang__)

#define MLA_CUDA 0
#define MLA_HIP 1
#define MLA_GLOBAL_ __attribute__((global))
#define MLA_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define MLA_SHARED __attribute__((shared))
// clang's launch_bounds attribute is ignored by the AMDGPU backend: it assumes 1024 threads, caps a lane at 128
// registers and spills. These two are obeyed. min_waves is waves per SIMD.
#define MLA_BOUNDS_(threads, min_waves) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(min_waves)))

using int8_t = __INT8_TYPE__;
using uint8_t = __UINT8_TYPE__;
using int16_t = __INT16_TYPE__;
using uint16_t = __UINT16_TYPE__;
using int32_t = __INT32_TYPE__;
using uint32_t = __UINT32_TYPE__;
using int64_t = __INT64_TYPE__;
using uint64_t = __UINT64_TYPE__;
using size_t = __SIZE_TYPE__;
using uintptr_t = __UINTPTR_TYPE__;

#else
#error "common/device.hpp: compile with clang -x hip or with nvcc"
#endif

// A kernel entry: MLA_KERNEL(256, 1) void MLA_SUITE_KERNEL(Params p) { ... }
// `threads` is the exact workgroup size, `min_waves` the waves per SIMD that must stay resident.
#define MLA_KERNEL(threads, min_waves) extern "C" MLA_GLOBAL_ MLA_BOUNDS_(threads, min_waves)

namespace mla {

#if MLA_CUDA
MLA_DEVICE int thread_id() { return static_cast<int>(threadIdx.x); }
MLA_DEVICE int block_id_x() { return static_cast<int>(blockIdx.x); }
MLA_DEVICE int block_id_y() { return static_cast<int>(blockIdx.y); }
MLA_DEVICE int block_id_z() { return static_cast<int>(blockIdx.z); }
// All threads of the workgroup arrive; what they wrote to shared and global memory before is visible to them after.
MLA_DEVICE void block_sync() { __syncthreads(); }
#else
MLA_DEVICE int thread_id() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
MLA_DEVICE int block_id_x() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
MLA_DEVICE int block_id_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }
MLA_DEVICE int block_id_z() { return static_cast<int>(__builtin_amdgcn_workgroup_id_z()); }
MLA_DEVICE void block_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
#endif

// N elements of T that move as one: 2, 4, 8 or 16 bytes in one load or store. A plain aligned array on purpose:
// __builtin_bit_cast of an element of a clang ext_vector reads element 0 (clang 19 to 22, silently); an array element
// has no such trap.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T data[N];
  MLA_DEVICE T& operator[](int i) { return data[i]; }
  MLA_DEVICE const T& operator[](int i) const { return data[i]; }
};

// The bits of a value as another type of the same size. By value: the argument is copied to a scalar first, so an
// ext_vector element is read where it is (see Vec).
template <class To, class From>
MLA_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
#if MLA_CUDA
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
#else
  return __builtin_bit_cast(To, from);
#endif
}

}  // namespace mla
