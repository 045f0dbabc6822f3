// Branches, waits, barriers, cache control, and the instructions that only affect timing.
#include "wave.hpp"

namespace emulator {

static void nothing(Wave&, const Inst&) {}
static void sleep_a_while(Wave& wave, const Inst&) { wave.yielded = true; }
static void end_program(Wave& wave, const Inst&) {
  wait(wave, VM, 0);
  wait(wave, LGKM, 0);
  wave.ended = true;
}
static void barrier(Wave& wave, const Inst&) {
  wave.at_barrier = true;
  lds_pass_barrier(wave);
}

static void wait_counters(Wave& wave, const Inst& in) {
  if (in.mod[mod_vmcnt] >= 0) wait(wave, VM, u32(in.mod[mod_vmcnt]));
  if (in.mod[mod_lgkmcnt] >= 0) wait(wave, LGKM, u32(in.mod[mod_lgkmcnt]));
}
static const char* counters_named(Inst& in) {  // the front end writes count + 1, so that 0 means "not named"
  in.mod[mod_vmcnt]--;
  in.mod[mod_lgkmcnt]--;
  return nullptr;
}

enum Condition { ALWAYS, SCC0, SCC1, VCCZ, VCCNZ, EXECZ, EXECNZ };
template <Condition C>
static void branch(Wave& wave, const Inst& in) {
  bool taken = C == ALWAYS || (C == SCC0 && !wave.scc) || (C == SCC1 && wave.scc) ||
               (C == VCCZ && !wave.scalar64(VCC)) || (C == VCCNZ && wave.scalar64(VCC)) || (C == EXECZ && !wave.exec) ||
               (C == EXECNZ && wave.exec);
  if (taken) wave.pc = i32(in.mod[mod_target]);
}
static const char* has_target(Inst& in) {
  return in.mod[mod_target] < 0 ? "the branch target is not a label of this kernel" : nullptr;
}

// The front end makes relative addresses of constants relative to 0.
static void program_counter(Wave& wave, const Inst& in) { wave.set_scalar64(in.op[0].index, 0); }

static void clock(Wave& wave, const Inst& in) {
  wave.set_scalar64(in.op[0].index, wave.instructions);
  wave.scalar_load = wave.issued[LGKM] + 1;
  issue(wave, LGKM, &in.op[0]);
}

// hwreg(id, offset, size) arrives as id | offset << 6 | (size - 1) << 11. MODE is modelled; the identity of the place
// where a wave runs reads as zero.
constexpr int HW_MODE = 1;
static u32 mode_mask(const Inst& in) { return u32((1ull << ((in.mod[mod_hwreg] >> 11 & 31) + 1)) - 1); }
static void get_register(Wave& wave, const Inst& in) {
  bool mode = (in.mod[mod_hwreg] & 63) == HW_MODE;
  wave.set_scalar(in.op[0].index, mode ? wave.mode >> (in.mod[mod_hwreg] >> 6 & 31) & mode_mask(in) : 0);
}
static void set_register(Wave& wave, const Inst& in) {
  int shift = in.mod[mod_hwreg] >> 6 & 31;
  u32 mask = mode_mask(in) << shift;
  wave.set_mode((wave.mode & ~mask) | (scalar(wave, in.op[0]) << shift & mask));
  if (wave.mode & 15) report(wave, found_rounding_mode, wave.exec, 0, wave.mode & 15);
}
static const char* only_mode(Inst& in) {
  return (in.mod[mod_hwreg] & 63) == HW_MODE ? nullptr : "only the MODE register may be set";
}
static const char* readable(Inst& in) {
  i64 id = in.mod[mod_hwreg] & 63;  // MODE, HW_ID, GPR_ALLOC, LDS_ALLOC, XCC_ID
  return id == HW_MODE || (id >= 4 && id <= 6) || id == 20 ? nullptr : "this hardware register is not modelled";
}

static void write_back(Wave& wave, const Inst& in) {
  if (!in.mod[mod_sc1]) {
    issue(wave, VM, nullptr);
    return;
  }
  Landing& landing = issue_landing(wave, Landing::WRITE_BACK);
  landing.epoch = ++wave.group->epoch;
  landing.others_epoch = wave.group->interval_epoch;
}
static void invalidate(Wave& wave, const Inst& in) {
  if (!in.mod[mod_sc1]) return;
  wave.safe.join(wave.group->known);
  wave.safe.join(wave.known);
}

static const Opcode entries[] = {
    {"s_nop", nothing, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_setprio", nothing, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_icache_inv", nothing, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_dcache_inv", nothing, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_dcache_wb", nothing, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_sleep", sleep_a_while, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_endpgm", end_program, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_barrier", barrier, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_waitcnt", wait_counters, CONTROL, ANY_ARCH, 0, counters_named},
    {"s_branch", branch<ALWAYS>, CONTROL, ANY_ARCH, 0, has_target},
    {"s_cbranch_scc0", branch<SCC0>, CONTROL, ANY_ARCH, 0, has_target},
    {"s_cbranch_scc1", branch<SCC1>, CONTROL, ANY_ARCH, 0, has_target},
    {"s_cbranch_vccz", branch<VCCZ>, CONTROL, ANY_ARCH, 0, has_target},
    {"s_cbranch_vccnz", branch<VCCNZ>, CONTROL, ANY_ARCH, 0, has_target},
    {"s_cbranch_execz", branch<EXECZ>, CONTROL, ANY_ARCH, 0, has_target},
    {"s_cbranch_execnz", branch<EXECNZ>, CONTROL, ANY_ARCH, 0, has_target},
    {"s_getpc_b64", program_counter, CONTROL, ANY_ARCH, 0, nullptr},
    {"s_memtime", clock, SMEM, ANY_ARCH, 0, nullptr},
    {"s_memrealtime", clock, SMEM, ANY_ARCH, 0, nullptr},
    {"s_getreg_b32", get_register, CONTROL, ANY_ARCH, 0, readable},
    {"s_setreg_b32", set_register, CONTROL, ANY_ARCH, 0, only_mode},
    {"s_setreg_imm32_b32", set_register, CONTROL, ANY_ARCH, 0, only_mode},
    {"buffer_wbl2", write_back, CONTROL, ANY_ARCH, 0, nullptr},
    {"buffer_inv", invalidate, CONTROL, ANY_ARCH, 0, nullptr},
};
extern const Table control_table = {entries, sizeof(entries) / sizeof(entries[0])};

}  // namespace emulator
