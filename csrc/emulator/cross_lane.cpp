// Moves between lanes that go through registers only: readlane, writelane, permlane swaps.
#include "vector.hpp"

namespace emulator {

static void read_first_lane(Wave& wave, const Inst& in) {
  wave.set_scalar(in.op[0].index,
                  in.op[1].kind == VECTOR ? wave.v[in.op[1].index][first_lane(wave.exec)] : scalar(wave, in.op[1]));
}
static void read_lane(Wave& wave, const Inst& in) {
  wave.set_scalar(in.op[0].index, wave.v[in.op[1].index][scalar(wave, in.op[2]) & 63]);
}
static void write_lane(Wave& wave, const Inst& in) {
  wave.v[in.op[0].index][scalar(wave, in.op[2]) & 63] = scalar(wave, in.op[1]);
  wave.defined[in.op[0].index] = true;
}

// aux = distance: the odd blocks of `distance` lanes of the first register trade places with the even blocks of the
// second.
static void swap_lanes(Wave& wave, const Inst& in) {
  int distance = int(in.opcode->aux);
  u32 *first = wave.v[in.op[0].index], *second = wave.v[in.op[1].index];
  for (int l = 0; l < LANES; l++) {
    if (l / distance % 2 == 0) continue;
    int other = l - distance;
    u32 a = first[l], b = second[other];
    if (wave.exec >> l & 1) first[l] = b;
    if (wave.exec >> other & 1) second[other] = a;
  }
  wave.defined[in.op[0].index] = wave.defined[in.op[1].index] = true;
}

static void swap_registers(Wave& wave, const Inst& in) {
  u32 *a = wave.v[in.op[0].index], *b = wave.v[in.op[1].index];
  for_lanes(wave.exec, [&](int l) {
    u32 t = a[l];
    a[l] = b[l];
    b[l] = t;
  });
  wave.defined[in.op[0].index] = wave.defined[in.op[1].index] = true;
}

static const Opcode entries[] = {
    {"v_readfirstlane_b32", read_first_lane, VALU, ANY_ARCH, 0, nullptr},
    {"v_readlane_b32", read_lane, VALU, ANY_ARCH, 0, nullptr},
    {"v_writelane_b32", write_lane, VALU, ANY_ARCH, 0, nullptr},
    {"v_swap_b32", swap_registers, VALU, ANY_ARCH, 0, nullptr},
    {"v_permlane16_swap_b32", swap_lanes, VALU, GFX950, 16, nullptr},
    {"v_permlane32_swap_b32", swap_lanes, VALU, GFX950, 32, nullptr},
};
extern const Table cross_lane_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
