// Matrix instructions: D[M, N] = A[M, K] B[K, N] + C.
//
// Lane l holds row (A) or column (B) l % M and the K elements of group l / M, consecutive in its registers; but the
// 8-bit formats of f8f6f4 hold them in two groups of 16, the second from the upper half of K. Block b of 32 elements
// along K is scaled by the lane of group b. Result element i of lane l is column l % N and row 4 (l / N) + i for N =
// 16, 4 (l / N) + i % 4 + 8 (i / 4) for N = 32. Products and sums are made in double and rounded to f32 once: the real
// unit's internal width and order are not public.
#include "narrow.hpp"
#include "vector.hpp"

namespace emulator {

enum Element { BF16, F16, FP8, BF8, F32, XF32, I8, F64, F8F6F4 };
struct Shape {
  int size, k, passes;
  Element a, b;
  bool scaled;
};

constexpr i64 pack(int size, int k, int passes, Element a, Element b, bool scaled = false) {
  return i64(size) | i64(k) << 8 | i64(passes) << 20 | i64(a) << 32 | i64(b) << 40 | i64(scaled) << 48;
}
static Shape unpack(i64 aux) {
  return Shape{int(aux & 255),           int(aux >> 8 & 0xfff),    int(aux >> 20 & 0xfff),
               Element(aux >> 32 & 255), Element(aux >> 40 & 255), bool(aux >> 48 & 1)};
}

static Narrow selected_format(i64 code) {
  constexpr Narrow FORMATS[] = {E4M3, E5M2, E2M3, E3M2, E2M1};
  return FORMATS[code];
}
static int bits_of(Narrow f) { return 1 + NARROW[f].exponent_bits + NARROW[f].mantissa_bits; }

// Element `i` of an operand in COUNT lanes from `first`, widened to double. A loop over lanes is one over words that
// follow each other.
template <int COUNT>
static void read_element(const Wave& wave, const Inst& in, const Operand& op, Element type, i64 format, int i,
                         int first, double* out) {
  auto word_of = [&](int index, int lane) { return wave.v[op.index + index][first + lane]; };
  switch (type) {
    case BF16:
      for (int l = 0; l < COUNT; l++) out[l] = bf16_to_float(u16(word_of(i / 2, l) >> (16 * (i % 2))));
      break;
    case F16:
      for (int l = 0; l < COUNT; l++) out[l] = half_to_float(u16(word_of(i / 2, l) >> (16 * (i % 2))));
      break;
    case F32:
      for (int l = 0; l < COUNT; l++) out[l] = real(word_of(i, l));
      break;
    case XF32:  // ten mantissa bits of the f32
      for (int l = 0; l < COUNT; l++) out[l] = real(word_of(i, l) & 0xffffe000);
      break;
    case I8:
      for (int l = 0; l < COUNT; l++) out[l] = i8(word_of(i / 4, l) >> (8 * (i % 4)));
      break;
    case F64:
      for (int l = 0; l < COUNT; l++)
        out[l] = bit_cast<double>(u64(word_of(2 * i + 1, l)) << 32 | word_of(2 * i, l));
      break;
    case FP8:
    case BF8: {
      const float* table = narrow_values(eight_bit(in, type == BF8));
      for (int l = 0; l < COUNT; l++) out[l] = table[word_of(i / 4, l) >> (8 * (i % 4)) & 255];
      break;
    }
    case F8F6F4: {
      Narrow narrow = selected_format(format);
      const float* table = narrow_values(narrow);
      int width = bits_of(narrow), at = i * width, end = (at + width - 1) / 32;
      for (int l = 0; l < COUNT; l++) {
        u64 two = u64(word_of(end, l)) << 32 | word_of(at / 32, l);
        out[l] = table[u32(two >> (at % 32)) & ((1u << width) - 1)];
      }
      break;
    }
  }
}

static double block_scale(Wave& wave, const Operand& op, int byte, int lane) {
  u32 x = op.kind == VECTOR ? wave.v[op.index][lane] : scalar(wave, op);
  u32 e = x >> (8 * byte) & 255;
  return e == 255 ? double(real(0x7fc00000)) : bit_cast<double>(u64(int(e) - 127 + 1023) << 52);
}

// Where element i of a lane's group lies along K.
static int depth_of(Element type, i64 format, int group, int i, int own, int k_size) {
  bool halves = type == F8F6F4 && bits_of(selected_format(format)) == 8;
  return halves ? i / 16 * (k_size / 2) + group * 16 + i % 16 : group * own + i;
}

static int result_row(int size, int lane, int i) { return 4 * (lane / size) + i % 4 + 8 * (i / 4); }

template <int SIZE>
static void multiply(double (*a)[SIZE], double (*b)[SIZE], double (*d)[SIZE], int k_size) {
  for (int m = 0; m < SIZE; m++)
    for (int k = 0; k < k_size; k++) {
      double x = a[k][m];
      for (int n = 0; n < SIZE; n++) d[m][n] += x * b[k][n];
    }
}

template <int SIZE>
static void matrix(Wave& wave, const Inst& in) {
  Shape shape = unpack(in.opcode->aux);
  if (wave.exec != ALL_LANES) report(wave, found_partial_exec_matrix, ~wave.exec, 0, 0);
  alignas(64) double a[128][SIZE];  // both by depth
  alignas(64) double b[128][SIZE];
  alignas(64) double d[SIZE][SIZE];
  int groups = LANES / SIZE, own = shape.k / groups, results = SIZE * SIZE / LANES;
  i64 select = in.mod[mod_op_sel] | (in.mod[mod_has_op_sel_hi] ? in.mod[mod_op_sel_hi] : 7)
                                        << 8;  // two bits pick a scale byte
  i64 of_a = in.mod[mod_cbsz], of_b = in.mod[mod_blgp];
  for (int group = 0; group < groups; group++)
    for (int i = 0; i < own; i++) {
      double* rows = a[depth_of(shape.a, of_a, group, i, own, shape.k)];
      double* columns = b[depth_of(shape.b, of_b, group, i, own, shape.k)];
      read_element<SIZE>(wave, in, in.op[1], shape.a, of_a, i, group * SIZE, rows);
      read_element<SIZE>(wave, in, in.op[2], shape.b, of_b, i, group * SIZE, columns);
    }
  for (int lane = 0; shape.scaled && lane < LANES; lane++) {
    double sa = block_scale(wave, in.op[4], int((select & 1) | (select >> 8 & 1) << 1), lane);
    double sb = block_scale(wave, in.op[5], int((select >> 1 & 1) | (select >> 9 & 1) << 1), lane);
    for (int k = lane / SIZE * 32; k < lane / SIZE * 32 + 32; k++) {
      a[k][lane % SIZE] *= sa;
      b[k][lane % SIZE] *= sb;
    }
  }
  const Operand& c = in.op[3];
  bool integer = shape.a == I8;
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < results; i++) {
      u32 w = c.kind == VECTOR ? wave.v[c.index + i][lane] : u32(c.literal);
      d[result_row(SIZE, lane, i)][lane % SIZE] = integer ? double(i32(w)) : double(real(w));
    }
  multiply<SIZE>(a, b, d, shape.k);
  for (int i = 0; i < results; i++) {
    u32* row = wave.v[in.op[0].index + i];
    wave.defined[in.op[0].index + i] = true;
    for (int lane = 0; lane < LANES; lane++) {
      double x = d[result_row(SIZE, lane, i)][lane % SIZE];
      row[lane] = integer ? u32(i64(x)) : word(float(x));
    }
  }
}

// 16x16x4 f64: one double per lane and operand, four result rows spread over the lane groups.
static void matrix_f64(Wave& wave, const Inst& in) {
  if (wave.exec != ALL_LANES) report(wave, found_partial_exec_matrix, ~wave.exec, 0, 0);
  double a[4][16], b[4][16], d[16][16];
  for (int group = 0; group < 4; group++) {
    read_element<16>(wave, in, in.op[1], F64, 0, 0, group * 16, a[group]);
    read_element<16>(wave, in, in.op[2], F64, 0, 0, group * 16, b[group]);
  }
  const Operand& c = in.op[3];
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) {
      u64 w = c.kind == VECTOR ? u64(wave.v[c.index + 2 * i + 1][lane]) << 32 | wave.v[c.index + 2 * i][lane] : c.wide;
      d[4 * i + lane / 16][lane % 16] = bit_cast<double>(w);
    }
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++)
      for (int k = 0; k < 4; k++) d[m][n] = fma(a[k][m], b[k][n], d[m][n]);
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) {
      u64 w = bit_cast<u64>(d[4 * i + lane / 16][lane % 16]);
      wave.v[in.op[0].index + 2 * i][lane] = u32(w);
      wave.v[in.op[0].index + 2 * i + 1][lane] = u32(w >> 32);
    }
}

static int registers_for(const Shape& shape, Element type, i64 format) {
  int own = shape.k / (LANES / shape.size);
  switch (type) {
    case BF16:
    case F16:
      return own / 2;
    case FP8:
    case BF8:
    case I8:
      return own / 4;
    case F32:
    case XF32:
      return own;
    case F64:
      return 2 * own;
    case F8F6F4:
      return own * bits_of(selected_format(format)) / 32;
  }
  return 0;
}

static const char* prepare(Inst& in) {
  Shape shape = unpack(in.opcode->aux);
  bool selects = shape.a == F8F6F4;
  if (!selects && (in.mod[mod_cbsz] || in.mod[mod_abid] || in.mod[mod_blgp]))
    return "cbsz, abid and blgp are modelled for f8f6f4 only";
  if (selects && (in.mod[mod_cbsz] > 4 || in.mod[mod_blgp] > 4))
    return "cbsz and blgp select one of five formats, 0 to 4";
  if (in.operands != (shape.scaled ? 6 : 4)) return "wrong number of operands for a matrix instruction";
  if (in.op[1].kind != VECTOR || in.op[2].kind != VECTOR) return "A and B are vector registers";
  if (in.op[1].count != registers_for(shape, shape.a, in.mod[mod_cbsz])) return "wrong number of registers for A";
  if (in.op[2].count != registers_for(shape, shape.b, in.mod[mod_blgp])) return "wrong number of registers for B";
  int results = shape.size * shape.size / LANES * (shape.a == F64 ? 2 : 1);
  if (in.op[0].kind != VECTOR || in.op[0].count != results) return "wrong number of registers for D";
  if (in.op[3].kind == VECTOR ? in.op[3].count != results : in.op[3].kind != LITERAL)
    return "wrong number of registers for C";
  in.cost = shape.passes;
  // The narrow formats take half the passes only if both operands are narrow.
  if (selects && in.mod[mod_cbsz] >= 2 && in.mod[mod_blgp] >= 2) in.cost = shape.passes / 2;
  return nullptr;
}

#define M16(name, k, passes, a, b, arch) {name, matrix<16>, MATRIX, arch, pack(16, k, passes, a, b), prepare}
#define M32(name, k, passes, a, b, arch) {name, matrix<32>, MATRIX, arch, pack(32, k, passes, a, b), prepare}
static const Opcode entries[] = {
    M16("v_mfma_f32_16x16x16_bf16", 16, 4, BF16, BF16, ANY_ARCH),
    M16("v_mfma_f32_16x16x16_f16", 16, 4, F16, F16, ANY_ARCH),
    M32("v_mfma_f32_32x32x8_bf16", 8, 8, BF16, BF16, ANY_ARCH),
    M32("v_mfma_f32_32x32x8_f16", 8, 8, F16, F16, ANY_ARCH),
    M16("v_mfma_f32_16x16x32_bf16", 32, 4, BF16, BF16, GFX950),
    M16("v_mfma_f32_16x16x32_f16", 32, 4, F16, F16, GFX950),
    M32("v_mfma_f32_32x32x16_bf16", 16, 8, BF16, BF16, GFX950),
    M32("v_mfma_f32_32x32x16_f16", 16, 8, F16, F16, GFX950),
    M16("v_mfma_f32_16x16x32_fp8_fp8", 32, 4, FP8, FP8, ANY_ARCH),
    M16("v_mfma_f32_16x16x32_fp8_bf8", 32, 4, FP8, BF8, ANY_ARCH),
    M16("v_mfma_f32_16x16x32_bf8_fp8", 32, 4, BF8, FP8, ANY_ARCH),
    M16("v_mfma_f32_16x16x32_bf8_bf8", 32, 4, BF8, BF8, ANY_ARCH),
    M32("v_mfma_f32_32x32x16_fp8_fp8", 16, 8, FP8, FP8, ANY_ARCH),
    M32("v_mfma_f32_32x32x16_fp8_bf8", 16, 8, FP8, BF8, ANY_ARCH),
    M32("v_mfma_f32_32x32x16_bf8_fp8", 16, 8, BF8, FP8, ANY_ARCH),
    M32("v_mfma_f32_32x32x16_bf8_bf8", 16, 8, BF8, BF8, ANY_ARCH),
    M16("v_mfma_f32_16x16x4_f32", 4, 8, F32, F32, ANY_ARCH),
    M32("v_mfma_f32_32x32x2_f32", 2, 16, F32, F32, ANY_ARCH),
    M16("v_mfma_f32_16x16x8_xf32", 8, 4, XF32, XF32, GFX942),
    M32("v_mfma_f32_32x32x4_xf32", 4, 8, XF32, XF32, GFX942),
    M16("v_mfma_i32_16x16x32_i8", 32, 4, I8, I8, ANY_ARCH),
    M32("v_mfma_i32_32x32x16_i8", 16, 8, I8, I8, ANY_ARCH),
    M16("v_mfma_i32_16x16x64_i8", 64, 4, I8, I8, GFX950),
    M32("v_mfma_i32_32x32x32_i8", 32, 8, I8, I8, GFX950),
    M16("v_mfma_f32_16x16x128_f8f6f4", 128, 8, F8F6F4, F8F6F4, GFX950),
    M32("v_mfma_f32_32x32x64_f8f6f4", 64, 16, F8F6F4, F8F6F4, GFX950),
    {"v_mfma_scale_f32_16x16x128_f8f6f4", matrix<16>, MATRIX, GFX950, pack(16, 128, 8, F8F6F4, F8F6F4, true), prepare},
    {"v_mfma_scale_f32_32x32x64_f8f6f4", matrix<32>, MATRIX, GFX950, pack(32, 64, 16, F8F6F4, F8F6F4, true), prepare},
    {"v_mfma_f64_16x16x4_f64", matrix_f64, MATRIX, ANY_ARCH, pack(16, 4, 8, F64, F64), prepare},
};
extern const Table matrix_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
