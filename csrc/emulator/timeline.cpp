// Plays the traces of a workgroup's waves on the units of one compute unit, in the order of time.
#include "timeline.hpp"

#include "wave.hpp"

namespace emulator {

constexpr int REGISTERS = VECTORS + SCALARS;

static double later(double a, double b) { return a > b ? a : b; }

// Memory operations that a counter still owes, in order; an operation is complete no earlier than those before it.
struct Owed {
  double done[64];
  u32 issued, retired;
  double wait(u32 outstanding) {  // the time at which at most so many are left
    double time = 0;
    for (; issued - retired > outstanding; retired++) time = done[retired % 64];
    return time;
  }
  void add(double time, u32 limit) {
    if (issued - retired >= limit) wait(limit - 1);
    if (issued != retired) time = later(time, done[(issued - 1) % 64]);
    done[issued++ % 64] = time;
  }
  double full(u32 limit) const { return issued - retired >= limit ? done[retired % 64] : 0; }
};

// Who is next is decided from this alone, since it is asked for every instruction of every wave.
struct Turn {
  double ready;  // when the wave may issue its next instruction, whose registers are there
  u32 simd, priority;
  Class group;
  bool waits;  // at a barrier, or ended
};

struct Player {
  const List<Event>* trace;
  u32 at, copy;
  double finish;
  bool at_barrier, ended;
  Owed owed[2];
  double arrives[REGISTERS];
};

struct Simd {
  double vector_free, matrix_free;
};

struct Stage {
  const Program& program;
  const TimeModel& model;
  Turn* turns;
  Player* players;
  u32 count, waves;
  Simd simds[8];
  double lds_free, memory_free, cache_free;
  GroupTime busy;

  void look_ahead(const Player& p, Turn& turn) {
    if (p.at >= p.trace->size) return;
    const Inst& in = program.code[(*p.trace)[p.at].pc];
    for (int r = 0; r < in.ranges; r++)
      for (int i = 0; i < in.range[r].count; i++) turn.ready = later(turn.ready, p.arrives[in.range[r].first + i]);
    turn.group = in.opcode->group;
    bool memory = turn.group == GLOBAL || turn.group == Class::ATOMIC;
    if (memory) turn.ready = later(turn.ready, p.owed[VM].full(COUNTER_LIMIT[VM]));
    if (turn.group == LDS || turn.group == SMEM)
      turn.ready = later(turn.ready, p.owed[LGKM].full(COUNTER_LIMIT[LGKM]));
  }

  double earliest(const Turn& turn) const {
    const Simd& simd = simds[turn.simd];
    if (turn.group == VALU || turn.group == TRANSCENDENTAL) return later(turn.ready, simd.vector_free);
    if (turn.group == MATRIX) return later(turn.ready, later(simd.vector_free, simd.matrix_free));
    return turn.ready;
  }

  void writes(Player& p, const Inst& in, double time) {
    if (!in.ranges || !in.operands) return;
    for (int i = 0; i < in.range[0].count; i++) p.arrives[in.range[0].first + i] = time;
  }

  // Bytes per clock from memory: as the matrix load so far slows the clock, a share of the chip is more of them.
  double rate(double time) const {
    double load = time > 0 ? busy.matrix / (model.simds * time) : 0;
    double share = model.chip_rate / (1 - model.slowdown * (load < 1 ? load : 1));
    return share < model.memory_rate ? share : model.memory_rate;
  }

  // Loads, stores and atomics wait for the first-level cache's throughput and for what this unit gets of memory.
  double memory_done(double time, double bytes, double fetched) {
    cache_free = later(cache_free, time) + bytes / model.cache_rate;
    double clocks = fetched / rate(time);
    memory_free = later(memory_free, time) + clocks;
    busy.memory += clocks;
    return later(time + model.memory_latency, later(cache_free, memory_free));
  }

  void lds_takes(double time, double clocks) {
    lds_free = later(lds_free, time) + clocks;
    busy.lds += clocks;
  }

  void step(Player& p, Turn& turn) {
    const Event& event = (*p.trace)[p.at];
    const Inst& in = program.code[event.pc];
    Simd& simd = simds[turn.simd];
    double time = earliest(turn);
    turn.ready = time + model.issue;
    switch (in.opcode->group) {
      case VALU:
      case TRANSCENDENTAL: {
        double clocks = in.opcode->group == VALU ? model.issue : model.transcendental;
        simd.vector_free = time + clocks;
        busy.vector += clocks;
        writes(p, in, time + clocks + model.vector_latency - model.issue);
        break;
      }
      case MATRIX:
        simd.vector_free = time + model.issue;
        simd.matrix_free = time + 4 * in.cost;
        busy.matrix += 4 * in.cost;
        writes(p, in, time + 4 * in.cost + model.matrix_extra);
        break;
      case LDS:
        lds_takes(time, event.lds_clocks / model.lds_rate);
        p.owed[LGKM].add(lds_free + model.lds_latency, COUNTER_LIMIT[LGKM]);
        break;
      case SMEM:
        p.owed[LGKM].add(time + model.scalar_latency, COUNTER_LIMIT[LGKM]);
        break;
      case GLOBAL:
      case Class::ATOMIC: {
        double done = memory_done(time, event.bytes, event.fetched);
        if (in.mod[mod_lds]) lds_takes(time, event.bytes / model.lds_direct);
        p.owed[VM].add(done, COUNTER_LIMIT[VM]);
        break;
      }
      case CONTROL:
        control(p, turn, in, time);
        break;
      case SALU:
        writes(p, in, time + model.issue);
        break;
    }
    p.at++;
    if (p.at >= p.trace->size) {
      p.ended = turn.waits = true;
      p.finish = later(turn.ready, later(p.owed[VM].wait(0), p.owed[LGKM].wait(0)));
    } else if ((*p.trace)[p.at].pc != event.pc + 1) {
      turn.ready += model.branch;
    }
    look_ahead(p, turn);
  }

  void control(Player& p, Turn& turn, const Inst& in, double time) {
    const char* name = in.opcode->name;
    if (!strcmp(name, "s_waitcnt")) {
      if (in.mod[mod_vmcnt] >= 0) turn.ready = later(turn.ready, p.owed[VM].wait(u32(in.mod[mod_vmcnt])));
      if (in.mod[mod_lgkmcnt] >= 0) turn.ready = later(turn.ready, p.owed[LGKM].wait(u32(in.mod[mod_lgkmcnt])));
    } else if (!strcmp(name, "s_barrier")) {
      p.at_barrier = turn.waits = true;
    } else if (!strcmp(name, "s_nop")) {
      turn.ready = time + model.issue * double(1 + (in.op[0].literal & 15));
    } else if (!strcmp(name, "s_sleep")) {
      turn.ready = time + 64 * double(in.op[0].literal & 127);
    } else if (!strcmp(name, "s_setprio")) {
      turn.priority = u32(in.op[0].literal & 3);
    } else if (!strcmp(name, "buffer_wbl2")) {
      p.owed[VM].add(time + model.memory_latency, COUNTER_LIMIT[VM]);
    }
  }

  // Waves of a workgroup go on once all that have not ended are there.
  void open_barrier(u32 copy) {
    double last = 0;
    for (u32 i = copy * waves; i < (copy + 1) * waves; i++) {
      if (!players[i].ended && !players[i].at_barrier) return;
      if (players[i].at_barrier) last = later(last, turns[i].ready);
    }
    for (u32 i = copy * waves; i < (copy + 1) * waves; i++) {
      if (!players[i].at_barrier) continue;
      players[i].at_barrier = turns[i].waits = false;
      turns[i].ready = last + model.barrier;
    }
  }

  void run() {
    while (true) {
      u32 first = count;
      double soonest = 0;
      for (u32 i = 0; i < count; i++) {
        if (turns[i].waits) continue;
        double time = earliest(turns[i]);
        if (first < count && (time > soonest || (time == soonest && turns[i].priority <= turns[first].priority)))
          continue;
        first = i;
        soonest = time;
      }
      if (first == count) return;
      step(players[first], turns[first]);
      if (turns[first].waits) open_barrier(players[first].copy);
    }
  }
};

GroupTime play(const Program& program, const List<Event>* traces, u32 waves, const TimeModel& model) {
  u32 count = waves * model.copies;
  Stage stage = {program, model, allocate<Turn>(count), allocate<Player>(count), count, waves, {}, 0, 0, 0, {}};
  for (u32 i = 0; i < count; i++) {
    Player& p = stage.players[i];
    p.trace = &traces[i % waves];
    p.copy = i / waves;
    p.ended = stage.turns[i].waits = !p.trace->size;
    stage.turns[i].simd = i % model.simds;
    stage.look_ahead(p, stage.turns[i]);
  }
  stage.run();
  GroupTime time = stage.busy;
  for (u32 i = 0; i < count; i++) time.clocks = later(time.clocks, stage.players[i].finish);
  time.matrix /= model.simds;
  time.vector /= model.simds;
  free(stage.turns);
  free(stage.players);
  return time;
}

}  // namespace emulator
