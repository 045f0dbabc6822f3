// The plain C interface, which mla_suite/emulator/core.py declares with ctypes.
#include "decode.hpp"
#include "machine.hpp"

using namespace emulator;

extern "C" {

struct EmulatorLaunch {
  const void* program;
  u32 grid[3], block[3];
  u32 lds_bytes, mode, user_scalars, ids;  // ids: bit per axis
  u32 scratch_bytes, reverse_waves;        // per lane
  u32 checks, threads, views, findings;
  u64 spin_limit, instruction_limit;
  const u32* user_scalar;
  const u32* order;
  const View* view;
  Finding* finding;  // MAX_FINDINGS of them
  PcCounts* counts;  // one per instruction
  u64* loaded;       // bytes per view
  u64* stored;
  const u32* initial_vectors;
  const u32* initial_scalars;
  u8* initial_lds;
  u32* final_vectors;
  u32* final_scalars;
  u8* final_lds;
  const TimeModel* model;
  GroupTime* times;  // one per model and workgroup
  u32 models;
};

#define EXPORT __attribute__((visibility("default")))

EXPORT u32 emulator_sizes(int what) {
  const u32 sizes[] = {sizeof(Record),         sizeof(Operand), MODIFIERS,       MAX_OPERANDS,
                       sizeof(EmulatorLaunch), sizeof(View),    sizeof(Finding), sizeof(PcCounts),
                       MAX_FINDINGS,           FINDING_KINDS,   MAX_DIMENSIONS,  sizeof(TimeModel),
                       sizeof(GroupTime)};
  return what >= 0 && what < int(sizeof(sizes) / sizeof(sizes[0])) ? sizes[what] : 0;
}
EXPORT const char* emulator_modifier_name(int index) {
  static const char* const NAMES[] = {
#define X(name) #name,
      EMULATOR_MODIFIERS(X)
#undef X
  };
  return index >= 0 && index < MODIFIERS ? NAMES[index] : nullptr;
}
EXPORT const char* emulator_finding_name(int index) {
  static const char* const NAMES[] = {
#define X(name) #name,
      EMULATOR_FINDINGS(X)
#undef X
  };
  return index >= 0 && index < FINDING_KINDS ? NAMES[index] : nullptr;
}
EXPORT const char* emulator_source_hash() { return EMULATOR_SOURCE_HASH; }
EXPORT int emulator_opcode(const char* name) { return find_opcode(name); }
EXPORT const char* emulator_opcode_name(int index) {
  const Opcode* opcode = opcode_at(index);
  return opcode ? opcode->name : nullptr;
}
EXPORT int emulator_opcode_class(int index) { return opcode_at(index)->group; }
EXPORT int emulator_opcode_arch(int index) { return opcode_at(index)->arch; }

EXPORT void* emulator_program(const void* records, int count, int arch, int* bad, const char** reason) {
  return build_program(static_cast<const Record*>(records), count, arch, bad, reason);
}
EXPORT void emulator_program_free(void* program) { free_program(static_cast<Program*>(program)); }
EXPORT int emulator_passes(const void* program, int pc) { return static_cast<const Program*>(program)->code[pc].cost; }

EXPORT void emulator_launch(EmulatorLaunch* request) {
  EmulatorLaunch& r = *request;
  Launch launch = {};
  launch.program = static_cast<const Program*>(r.program);
  memcpy(launch.grid, r.grid, sizeof(r.grid));
  memcpy(launch.block, r.block, sizeof(r.block));
  launch.lds_bytes = r.lds_bytes;
  launch.scratch_bytes = r.scratch_bytes;
  launch.reverse_waves = r.reverse_waves;
  launch.mode = r.mode;
  launch.user_scalars = r.user_scalars;
  launch.user_scalar = r.user_scalar;
  for (int axis = 0; axis < 3; axis++) launch.ids[axis] = r.ids >> axis & 1;
  launch.checks = r.checks;
  launch.spin_limit = r.spin_limit;
  launch.instruction_limit = r.instruction_limit;
  launch.order = r.order;
  launch.workgroups = u64(r.grid[0]) * r.grid[1] * r.grid[2];
  launch.initial_vectors = r.initial_vectors;
  launch.initial_scalars = r.initial_scalars;
  launch.initial_lds = r.initial_lds;
  launch.final_vectors = r.final_vectors;
  launch.final_scalars = r.final_scalars;
  launch.final_lds = r.final_lds;
  launch.model = r.model;
  launch.models = r.models;
  launch.times = r.times;
  launch.memory.open(r.view, r.views);
  launch.tags.open(launch.workgroups);
  pthread_mutex_init(&launch.lock, nullptr);
  u64 wanted = r.threads < launch.workgroups ? r.threads : launch.workgroups;
  launch.threads = int(wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted);
  launch.workers = allocate<Worker>(u64(launch.threads));
  u32 waves = (r.block[0] * r.block[1] * r.block[2] + LANES - 1) / LANES, size = u32(launch.program->size);
  for (int t = 0; t < launch.threads; t++) {
    Worker& worker = launch.workers[t];
    worker.launch = &launch;
    worker.id = t;
    worker.running = ~0u;
    worker.waves = static_cast<Wave*>(aligned_alloc(64, sizeof(Wave) * waves));
    for (u32 w = 0; w < waves; w++) {
      worker.waves[w].landings = allocate<Landing>(LANDINGS);
      worker.waves[w].lds_accesses = allocate<LdsAccess>(LDS_ACCESSES);
    }
    worker.counts = allocate<PcCounts>(size);
    worker.banks = allocate<BankMemo>(size);
    worker.traces = r.models ? allocate<List<Event>>(2 * waves) : nullptr;
    worker.played = -1;
    worker.loaded = allocate<u64>(r.views);
    worker.scratch = allocate<u8>(u64(waves) * LANES * r.scratch_bytes);
    worker.stored = allocate<u64>(r.views);
  }
  run_launch(launch);
  FindingList findings = {};
  for (int t = 0; t < launch.threads; t++) {
    Worker& worker = launch.workers[t];
    findings.merge(worker.findings);
    const u64* from = reinterpret_cast<const u64*>(worker.counts);
    u64* to = reinterpret_cast<u64*>(r.counts);
    for (u64 i = 0; i < u64(size) * (sizeof(PcCounts) / sizeof(u64)); i++) to[i] += from[i];
    for (u32 v = 0; v < r.views; v++) {
      r.loaded[v] += worker.loaded[v];
      r.stored[v] += worker.stored[v];
    }
    for (u32 w = 0; w < waves; w++) {
      free(worker.waves[w].landings);
      free(worker.waves[w].lds_accesses);
    }
    free(worker.waves);
    free(worker.counts);
    free(worker.banks);
    for (u32 w = 0; worker.traces && w < 2 * waves; w++) worker.traces[w].release();
    free(worker.traces);
    free(worker.loaded);
    free(worker.scratch);
    free(worker.stored);
    worker.lds.release();
  }
  for (u32 v = 0; r.checks && v < r.views; v++) {
    Finding f = {};
    if (!(r.view[v].access & COMPLETE) || !(f.detail = i64(launch.memory.unwritten(r.view[v], &f.address)))) continue;
    f.kind = found_global_unwritten;
    f.pc = -1 - i32(v);
    f.count = 1;
    findings.add(f);
  }
  memcpy(r.finding, findings.at, sizeof(Finding) * u32(findings.size));
  r.findings = u32(findings.size);
  free(launch.workers);
  launch.sync.release();
  launch.memory.close();
  pthread_mutex_destroy(&launch.lock);
}

}  // extern "C"
