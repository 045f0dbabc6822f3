// Scores of bf16 queries and e4m3 keys by the QK warpgroup of csrc/sm_90/decode on a CPU, compared with fp64: queries come in
// their stages, become fp16 and are multiplied. Arguments: heads (the rows of the sequence), and how a row's values are spread:
//   plain; wide (rows from 2^-60 to 2^60); apart (values of one row from 2^-24 to 1); zeros; nan (one value of row 0)
// Prints the largest error of a score beside the sum of its products' sizes; fails above 2^-20 of it.
#include <string>

#include "block.hpp"
#include "sm_90/decode/query_operands.hpp"
#include "sm_90/ptx/wgmma_rs.hpp"

namespace mla::sm_90 {

// S += Q K^T, 16 deep, at once: `element(row, k)` is of this warp's 16 rows of Q.
template <class Element>
void add_products(float (&s)[16], uint64_t keys, bool add, const Element& element) {
  const int lane = current % 32;
  for (int i = 0; i < 16; ++i) {
    float sum = add ? s[i] : 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += element(lane / 4 + i / 2 % 2 * 8, k) * element_of_b(keys, k, i / 4 * 8 + lane % 4 * 2 + i % 2);
    s[i] = sum;
  }
}

// Q in shared memory, in the 64-byte swizzle.
template <class T>
void qk_mma(float (&s)[16], uint64_t q, uint64_t keys, bool add) {
  static_assert(!T::is_bf16, "bf16 queries are to be multiplied as fp16");
  const uint32_t start = (q & 0x3FFF) << 4, stride = (q >> 32 & 0x3FFF) << 4;
  add_products(s, keys, add, [&](int row, int k) {
    const int of_group = current % 128 / 32 * 16 + row;
    uint32_t at = start + of_group / 8 * stride + of_group % 8 * 64 + k * 2;
    at ^= (at >> 7 & 3) << 4;
    uint16_t bits;
    std::memcpy(&bits, shared_at(at, 2), 2);
    return fp16_to_float(bits);
  });
}

// Q in registers.
template <class T>
void qk_mma(float (&s)[16], const uint32_t* q, uint64_t keys, bool add) {
  float rows[16][16];
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t pair = __shfl_sync(~0u, q[i], lane);
      for (int half = 0; half < 2; ++half)
        rows[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + half] = fp16_to_float(pair >> 16 * half);
    }
  add_products(s, keys, add, [&](int row, int k) { return rows[row][k]; });
}

}  // namespace mla::sm_90

#define private public
#include "sm_90/decode/mainloop_qk.hpp"
#undef private

namespace {

using namespace mla::sm_90;
using Policy = DecodePolicyOf<KvSource::fp8, ClusterNone, D_QK>;
using Traits = DecodeTraits<DecodeProblem<bf16, D_QK>, Policy>;
using Storage = SharedStorage<Traits>;

float queries[BLOCK_M][D_QK], keys[BLOCK_N][D_QK];
mla::DecodeTmaParams params{};
double worst = 0.0;

void put(uint32_t at, uint16_t bits) { std::memcpy(shared_at(at, 2), &bits, 2); }

// The queries as TMA brings them, and keys as the producer's warps convert them.
void fill_stages() {
  const uint32_t box = Traits::q_box_bytes(params);
  for (int row = 0; row * 64u < box; ++row)
    for (int column = 0; column < D_QK; ++column) {
      const int half = column / (D_QK / 2), of_half = column % (D_QK / 2);
      uint32_t at = of_half / 32 * box + row * 64 + of_half % 32 * 2;
      at ^= (at >> 7 & 3) << 4;
      put(Storage::KV + half * Traits::STAGE_BYTES + at, float_to_bf16(queries[row][column]));
    }
  for (int key = 0; key < BLOCK_N; ++key)
    for (int column = 0; column < D_QK; ++column) {
      uint32_t at = column / 64 * Traits::BLOCK_BYTES + key * 128 + column % 64 * 2;
      at ^= (at >> 7 & 7) << 4;
      put(Storage::KV + 2 * Traits::STAGE_BYTES + at, float_to_fp16(keys[key][column]));
    }
}

void compare(const QkSoftmax<Traits>& qk, const float (&s)[16]) {
  for (int i = 0; i < 16; ++i) {
    const int row = quad_row() + i / 2 % 2 * 8, key = key_of_score(i);
    if (row >= params.rows) continue;
    double exact = 0.0, size = 0.0;
    for (int column = 0; column < D_QK; ++column) {
      const double product = static_cast<double>(queries[row][column]) * keys[key][column];
      exact += product;
      size += std::fabs(product);
    }
    const double found = static_cast<double>(s[i]) * qk.scale_of(i / 2 % 2);
    if (std::isnan(exact) && std::isnan(found)) continue;
    const double error = size > 0.0 ? std::fabs(found - exact * qk.scale_) / (size * qk.scale_) : std::fabs(found);
    if (!std::isnan(worst) && !(error <= worst)) worst = error;
  }
}

void kernel() {
  if (current / 128 != 1) return;
  const Mbarriers<Traits> barriers(0);
  if (warpgroup_thread() == 0) {
    for (int stage = 0; stage < Traits::STAGES; ++stage) {
      mbarrier_init(barriers.kv_full(stage), 1);
      mbarrier_init(barriers.kv_empty(stage), 256);
    }
    fill_stages();
    for (int stage = 0; stage < 3; ++stage) mbarrier_arrive(barriers.kv_full(stage));
  }
  named_barrier_sync<PV_BARRIER, 128>();
  QkSoftmax<Traits> qk(params, 0);
  qk.tile_ = {};
  qk.tile_.length = qk.tile_.end_key = BLOCK_N;
  qk.load_q();
  float s[16];
  qk.multiply(s, [](int) {});
  compare(qk, s);
}

}  // namespace

int main(int, char** argv) {
  const std::string what = argv[2];
  std::mt19937 random{5};
  std::normal_distribution<float> normal;
  for (int row = 0; row < BLOCK_M; ++row)
    for (int column = 0; column < D_QK; ++column) {
      float value = normal(random);
      if (what == "wide") value = std::ldexp(value, row * 15 % 121 - 60);
      if (what == "apart") value = std::ldexp(value, -static_cast<int>(random() % 25));
      if (what == "zeros") value = row % 2 ? 0.0f : value;
      if (what == "nan" && row == 0 && column == 77) value = NAN;
      queries[row][column] = bf16_to_float(float_to_bf16(value));
    }
  for (auto& key : keys)
    for (float& value : key) value = e4m3_to_float(random() % 0x78 | (random() & 1) << 7);
  params.heads = params.rows = std::atoi(argv[1]);
  params.heads_reciprocal = params.heads > 1 ? 0xFFFFFFFFu / params.heads + 1 : 0;
  params.q_len = params.batch = 1;
  params.softmax_scale = 0.1f;
  Block block(3);
  if (!block.run(kernel)) {
    std::printf("threads wait for what never comes\n");
    return 1;
  }
  std::printf("scores off by %.1e of their products\n", worst);
  return worst <= 0x1p-20 ? 0 : 1;
}
