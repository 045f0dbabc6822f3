// Workgroups one after another on each host thread, waves in turn between barriers.
#include "machine.hpp"

namespace emulator {

void report(Wave& wave, FindingKind kind, u64 lanes, u64 address, i64 detail) {
  Finding f = {};
  f.kind = kind;
  f.pc = wave.pc - 1;
  f.wave = wave.id;
  f.workgroup = wave.group->index;
  f.detail = detail;
  f.lanes = lanes;
  f.address = address;
  f.count = 1;
  wave.worker->findings.add(f);
}

static void run_traced(Wave& wave, const Inst& in, const PcCounts& count) {
  PcCounts before = count;
  wave.worker->fetched = ALL_BYTES;
  in.run(wave, in);
  u64 clocks = count.lds_clocks_128 - before.lds_clocks_128, bytes = count.global_bytes - before.global_bytes;
  u64 fetched = wave.worker->fetched == ALL_BYTES ? bytes : wave.worker->fetched;
  wave.worker->traces[wave.id].push({in.pc, u32(clocks), u32(bytes), u32(fetched)});
}

enum Stop { STOP_BARRIER, STOP_END, STOP_YIELD, STOP_ABANDON };

static Stop run_wave(Wave& wave) {
  Worker& worker = *wave.worker;
  const Launch& launch = *worker.launch;
  const Program& program = *launch.program;
  wave.yielded = false;
  while (true) {
    const Inst& in = program.code[wave.pc++];
    if (launch.checks && (wave.issued[VM] != wave.retired[VM] || wave.issued[LGKM] != wave.retired[LGKM]))
      check_registers(wave, in);
    PcCounts& count = worker.counts[in.pc];
    count.times++;
    count.lanes += u64(__builtin_popcountll(wave.exec));
    if (worker.traces)
      run_traced(wave, in, count);
    else
      in.run(wave, in);
    if (++wave.instructions > launch.instruction_limit) {
      report(wave, found_instruction_limit, wave.exec, 0, i64(launch.instruction_limit));
      worker.abandon = true;
    }
    if (worker.abandon) return STOP_ABANDON;
    if (wave.ended) return STOP_END;
    if (wave.at_barrier) return STOP_BARRIER;
    if (wave.yielded) return STOP_YIELD;
    if (wave.pc >= program.size) {
      wave.ended = true;
      return STOP_END;
    }
  }
}

// Registers of hardware that starts a wave hold anything; a signalling pattern makes a use of one visible.
constexpr u32 GARBAGE = 0xffbadbad;

static void start_wave(Wave& wave, Worker& worker, int id) {
  const Launch& launch = *worker.launch;
  Landing* landings = wave.landings;
  LdsAccess* lds_accesses = wave.lds_accesses;
  memset(static_cast<void*>(wave.s), 0, sizeof(Wave) - sizeof(wave.v));
  wave.landings = landings;
  wave.lds_accesses = lds_accesses;
  for (int r = 0; r < VECTORS; r++)
    for (int l = 0; l < LANES; l++) wave.v[r][l] = GARBAGE;
  wave.id = id;
  wave.worker = &worker;
  wave.group = &worker.group;
  wave.set_mode(launch.mode);
  u32 threads = launch.block[0] * launch.block[1] * launch.block[2], first = u32(id) * LANES;
  u32 live = threads - first < u32(LANES) ? threads - first : u32(LANES);
  wave.set_exec(live == u32(LANES) ? ALL_LANES : (1ull << live) - 1);
  for (u32 i = 0; i < launch.user_scalars; i++) wave.s[i] = launch.user_scalar[i];
  u32 at = launch.user_scalars;
  for (int axis = 0; axis < 3; axis++)
    if (launch.ids[axis]) wave.s[at++] = worker.group.id[axis];
  for (u32 l = 0; l < u32(LANES); l++) {
    u32 t = first + l;
    wave.v[0][l] = t % launch.block[0] | t / launch.block[0] % launch.block[1] << 10 |
                   t / (launch.block[0] * launch.block[1]) << 20;
  }
  wave.defined[0] = true;
  if (launch.initial_vectors) {
    memcpy(wave.v, launch.initial_vectors, sizeof(wave.v));
    memset(wave.defined, 1, sizeof(wave.defined));
    for (int i = 0; i < SCALARS; i++) wave.set_scalar(i, launch.initial_scalars[i]);
  }
}

// A workgroup that executed what the one before it did takes as long.
static void play_workgroup(Worker& worker) {
  const Launch& launch = *worker.launch;
  u32 waves = u32(worker.group.waves), index = worker.group.index;
  List<Event>*now = worker.traces, *last = worker.traces + waves;
  bool same = worker.played >= 0;
  for (u32 w = 0; same && w < waves; w++)
    same = now[w].size == last[w].size && !memcmp(now[w].items, last[w].items, sizeof(Event) * now[w].size);
  for (u32 m = 0; m < launch.models; m++) {
    GroupTime* times = launch.times + m * launch.workgroups;
    times[index] = same ? times[worker.played] : play(*launch.program, now, waves, launch.model[m]);
  }
  worker.played = index;
  for (u32 w = 0; w < waves; w++) {
    List<Event> kept = last[w];
    last[w] = now[w];
    now[w] = kept;
    now[w].size = 0;
  }
}

static void finish_snippet(Worker& worker) {
  const Launch& launch = *worker.launch;
  const Wave& wave = worker.waves[0];
  memcpy(launch.final_vectors, wave.v, sizeof(wave.v));
  memcpy(launch.final_scalars, wave.s, sizeof(wave.s));
  launch.final_scalars[SCALARS] = wave.scc;
  memcpy(launch.final_lds, worker.lds.bytes, worker.lds.size);
}

static void forget(Wave& wave) {
  wave.known.release();
  wave.safe.release();
}

void run_workgroup(Worker& worker, u32 index, u32 position) {
  const Launch& launch = *worker.launch;
  Workgroup& group = worker.group;
  memset(&group, 0, sizeof(group));
  group.index = index;
  group.position = position;
  group.id[0] = index % launch.grid[0];
  group.id[1] = index / launch.grid[0] % launch.grid[1];
  group.id[2] = index / launch.grid[0] / launch.grid[1];
  group.waves = int((launch.block[0] * launch.block[1] * launch.block[2] + LANES - 1) / LANES);
  worker.abandon = false;
  worker.lds.open(launch.lds_bytes, launch.checks);
  if (launch.initial_lds) {
    memcpy(worker.lds.bytes, launch.initial_lds, launch.lds_bytes);
    for (u32 i = 0; launch.checks && i < launch.lds_bytes; i++)
      worker.lds.written[i] = 15;  // written before the first interval
  }
  for (int w = 0; w < group.waves; w++) start_wave(worker.waves[w], worker, w);
  int live = group.waves;
  while (live && !worker.abandon) {
    int waiting = 0, ended = 0;
    for (int w = 0; w < group.waves && !worker.abandon; w++) {
      Wave& wave = worker.waves[launch.reverse_waves ? group.waves - 1 - w : w];
      if (!wave.ended && !wave.at_barrier) run_wave(wave);
      ended += wave.ended;
      waiting += wave.at_barrier;
    }
    live = group.waves - ended;
    if (waiting != live || !waiting) continue;
    if (ended) {
      for (int w = 0; w < group.waves; w++)
        if (worker.waves[w].at_barrier)
          report(worker.waves[w], found_divergent_barrier, worker.waves[w].exec, 0, ended);
    }
    if (group.stored) group.epoch++;
    group.stored = false;
    group.interval_epoch = group.epoch;
    for (int w = 0; w < group.waves; w++) {
      Wave& wave = worker.waves[w];
      wave.at_barrier = false;
      group.known.join(wave.known);
      group.safe.join(wave.safe);
      forget(wave);
    }
    worker.lds.next_interval();
  }
  if (launch.final_vectors) finish_snippet(worker);
  if (worker.traces) play_workgroup(worker);
  for (int w = 0; w < group.waves; w++) {  // an abandoned workgroup leaves landings behind
    Wave& wave = worker.waves[w];
    forget(wave);
    for (; wave.landing_count; wave.landing_count--) {
      wave.landings[wave.landing_first].learned.release();
      wave.landing_first = (wave.landing_first + 1) % LANDINGS;
    }
  }
  group.known.release();
  group.safe.release();
}

static void* work(void* argument) {
  Worker& worker = *static_cast<Worker*>(argument);
  Launch& launch = *worker.launch;
  while (!__atomic_load_n(&launch.stop, __ATOMIC_RELAXED)) {
    u32 position = __atomic_fetch_add(&launch.next, 1u, __ATOMIC_SEQ_CST);
    if (position >= launch.workgroups) break;
    __atomic_store_n(&worker.running, position, __ATOMIC_SEQ_CST);
    run_workgroup(worker, launch.order ? launch.order[position] : position, position);
    if (worker.abandon) __atomic_store_n(&launch.stop, true, __ATOMIC_RELAXED);
  }
  __atomic_store_n(&worker.running, ~0u, __ATOMIC_SEQ_CST);
  return nullptr;
}

void run_launch(Launch& launch) {
  pthread_t threads[MAX_THREADS];
  int started = 1;
  for (int t = 1; t < launch.threads; t++, started++)
    if (pthread_create(&threads[t], nullptr, work, &launch.workers[t])) break;  // fewer threads do the same work
  work(&launch.workers[0]);
  for (int t = 1; t < started; t++) pthread_join(threads[t], nullptr);
}

}  // namespace emulator
