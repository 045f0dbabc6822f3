// Memory on a CPU. The shared memory of each block is an array, whose addresses begin at 0. In a cluster the bits above
// these say whose it is; without any it is the block's own.
#pragma once

#include "common/device.hpp"
#include "sm_90/ptx/math.hpp"

namespace mla::sm_90 {

constexpr uint32_t SHARED_BYTES = 232448;
alignas(1024) inline unsigned char memory[CLUSTER_BLOCKS * SHARED_BYTES];

constexpr int BLOCK_BITS = 24;  // where the number of the block, plus one, begins in an address
inline uint32_t in_block(int block, uint32_t address) {
  return static_cast<uint32_t>(block + 1) << BLOCK_BITS | (address & ((1u << BLOCK_BITS) - 1));
}
// The same address for every block.
inline uint32_t of_cluster(uint32_t address) {
  return address >> BLOCK_BITS == 0 ? in_block(current_block, address) : address;
}
inline unsigned char* shared_at(uint32_t address, uint32_t bytes) {
  const uint32_t named = of_cluster(address), at = named & ((1u << BLOCK_BITS) - 1);
  if (at % bytes != 0 || at + bytes > SHARED_BYTES || named >> BLOCK_BITS > CLUSTER_BLOCKS)
    fail("no such shared address:", address);
  if (ended_blocks[(named >> BLOCK_BITS) - 1]) fail("its block has ended:", address);
  return memory + ((named >> BLOCK_BITS) - 1) * SHARED_BYTES + at;
}

inline uint32_t smem_address(const void*) { return 0; }
inline uint32_t read_thread_id() { return current; }
inline int warpgroup_thread() { return current % 128; }
template <class... Words>
void pin_registers(Words&...) {}
inline void pin_floats(float&, float&) {}
template <class... Words>
void pin_together(Words&...) {}
template <class... Words>
void materialize(Words...) {}
inline uint64_t row_address(uint64_t first, uint32_t row, uint32_t stride) { return first + uint64_t{row} * stride; }
template <class T>
T* global_pointer(T* pointer) {
  return pointer;
}
inline int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }
inline void prefetch_l2(const void*) {}
inline void prefetch_l1(const void*) {}
template <class V>
V ld_global(const V* address) {
  return *address;
}
inline void ld_global_v4(const void* from, uint32_t (&to)[4]) { std::memcpy(to, from, 16); }
inline int ld_relaxed_gpu(const int32_t* address) { return *address; }
inline uint4 ld_relaxed_gpu_v4(const float* from) {
  uint4 words;
  std::memcpy(&words, from, 16);
  return words;
}

template <class V>
V ld_shared(uint32_t from) {
  V value;
  std::memcpy(&value, shared_at(from, sizeof value), sizeof value);
  return value;
}
template <class V>
void st_shared(uint32_t to, V value) {
  std::memcpy(shared_at(to, sizeof value), &value, sizeof value);
}
inline uint32_t ld_shared_u8(uint32_t from) { return ld_shared<uint8_t>(from); }
inline uint32_t ld_shared_u16(uint32_t from) { return ld_shared<uint16_t>(from); }
template <class V>
void ld_shared_v2(uint32_t from, V (&to)[2]) {
  std::memcpy(to, shared_at(from, sizeof to), sizeof to);
}
template <class V>
void ld_shared_v4(uint32_t from, V (&to)[4]) {
  std::memcpy(to, shared_at(from, sizeof to), sizeof to);
}
template <class V>
void ld_shared_v2(uint32_t from, V& a, V& b) {
  V words[2];
  ld_shared_v2(from, words);
  a = words[0], b = words[1];
}
template <class V>
void ld_shared_v4(uint32_t from, V& a, V& b, V& c, V& d) {
  V words[4];
  ld_shared_v4(from, words);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
template <class V>
void st_shared_v2(uint32_t to, const V (&values)[2]) {
  std::memcpy(shared_at(to, sizeof values), values, sizeof values);
}
template <class V>
void st_shared_v2(uint32_t to, V a, V b) {
  const V values[2] = {a, b};
  st_shared_v2(to, values);
}
inline void st_shared_v4(uint32_t to, const float (&values)[4]) { std::memcpy(shared_at(to, 16), values, 16); }
inline void st_shared_v4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  std::memcpy(shared_at(to, 16), words, 16);
}
inline void st_shared_v4_if(bool active, uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (active) st_shared_v4(to, a, b, c, d);
}
inline void red_max_global(float* to, float value) { *to = max(*to, value); }
inline void red_add_global(float* to, const float (&words)[4]) {
  for (int i = 0; i < 4; ++i) to[i] = add_without_subnormals(to[i], words[i]);
}
inline void st_relaxed_gpu(float* to, const float (&words)[4]) { std::memcpy(to, words, 16); }
inline void st_relaxed_gpu(float* to, float word) { *to = word; }
inline void st_relaxed_gpu(uint4* to, const uint4& words) { *to = words; }

// Matrices of 8 x 8 elements: lane r of its eight has the address of row r, and a register two elements of row lane / 4.
inline void stmatrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t registers[4] = {a, b, c, d};
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint64_t* words = meet_warp(registers[matrix]);
    if (current % 32 / 8 != matrix) continue;
    for (int i = 0; i < 4; ++i) st_shared(to + 4 * i, static_cast<uint32_t>(words[current % 8 * 4 + i]));
  }
  __syncwarp();
}
inline void ldmatrix_x4(uint32_t from, uint32_t* to) {
  const uint64_t* addresses = meet_warp(from);
  uint32_t rows[4];
  for (int matrix = 0; matrix < 4; ++matrix) rows[matrix] = addresses[matrix * 8 + current % 32 / 4];
  for (int matrix = 0; matrix < 4; ++matrix) to[matrix] = ld_shared<uint32_t>(rows[matrix] + current % 4 * 4);
  __syncwarp();
}

// Row r of a matrix goes where lane r of its eight says; its element e is column r of register row e.
inline void stmatrix_trans_x4(uint32_t to, const uint32_t (&matrices)[4]) {
  const int lane = current % 32;
  uint16_t row[8];
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint64_t* words = meet_warp(matrices[matrix]);
    if (lane / 8 != matrix) continue;
    for (int e = 0; e < 8; ++e) row[e] = static_cast<uint16_t>(words[e * 4 + lane % 8 / 2] >> lane % 2 * 16);
  }
  std::memcpy(shared_at(to, 16), row, 16);
  __syncwarp();
}

}  // namespace mla::sm_90
