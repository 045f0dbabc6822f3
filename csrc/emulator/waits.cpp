// The two counters a kernel waits on, and what their waits make visible.
#include "wave.hpp"

namespace emulator {

static void land(Wave& wave, Landing& landing) {
  Workgroup& group = *wave.group;
  switch (landing.kind) {
    case Landing::NOTHING:
      break;
    case Landing::LDS_WRITE: {
      Lds& lds = wave.worker->lds;
      for_lanes(landing.lanes, [&](int lane) {
        u32 at = landing.address[lane];
        if (wave.worker->launch->checks) {
          memset(lds.in_flight + at, 0, landing.bytes);
          lds_check_write(wave, lane, at, landing.bytes);
        }
        memcpy(lds.bytes + at, landing.data[lane], landing.bytes);
      });
      break;
    }
    case Landing::WRITE_BACK:
      for (int w = 0; w < group.waves; w++) {
        u32 epoch = w == wave.id ? landing.epoch : landing.others_epoch;
        if (group.released[w] < epoch) group.released[w] = epoch;
      }
      break;
    case Landing::ACQUIRE:
      wave.known.join(landing.learned);
      landing.learned.release();
      break;
  }
}

static void retire(Wave& wave, Counter counter, u32 sequence) {
  wave.retired[counter] = sequence;
  if (counter == LGKM) {
    lds_retire(wave, sequence);
    return;
  }
  while (wave.landing_count) {
    Landing& landing = wave.landings[wave.landing_first];
    if (i32(landing.sequence - sequence) > 0) break;
    land(wave, landing);
    wave.landing_first = (wave.landing_first + 1) % LANDINGS;
    wave.landing_count--;
  }
}

void wait(Wave& wave, Counter counter, u32 outstanding) {
  u32 in_flight = wave.issued[counter] - wave.retired[counter];
  if (in_flight <= outstanding) return;
  bool scalar_loads = counter == LGKM && i32(wave.scalar_load - wave.retired[LGKM]) > 0;
  if (outstanding && scalar_loads) return;  // out of order: only a wait for zero says which have returned
  retire(wave, counter, wave.issued[counter] - outstanding);
}

void issue(Wave& wave, Counter counter, const Operand* destination) {
  wait(wave, counter, COUNTER_LIMIT[counter] - 1);
  u32 sequence = ++wave.issued[counter];
  if (!destination) return;
  int first = destination->index + (destination->kind == SCALAR ? VECTORS : 0);
  for (int i = 0; i < destination->count; i++) {
    wave.pending[counter][first + i] = sequence;
    if (destination->kind == VECTOR) wave.defined[first + i] = true;
  }
}

Landing& issue_landing(Wave& wave, Landing::Kind kind, const Operand* destination) {
  issue(wave, VM, destination);
  Landing& landing = wave.landings[(wave.landing_first + wave.landing_count++) % LANDINGS];
  landing.kind = kind;
  landing.sequence = wave.issued[VM];
  landing.learned = Clock{};
  return landing;
}

// Every register an instruction names, read or written, must have arrived. A load into a register that the same counter
// still owes is allowed for vector memory and LDS: these return in order.
void check_registers(Wave& wave, const Inst& in) {
  for (int counter = 0; counter < 2; counter++) {
    u32 issued = wave.issued[counter], retired = wave.retired[counter];
    if (issued == retired) continue;
    u32 outstanding = issued - retired;
    for (int r = 0; r < in.ranges; r++) {
      int first = in.range[r].first;
      for (int i = 0; i < in.range[r].count; i++) {
        u32 sequence = wave.pending[counter][first + i];
        if (!sequence || sequence - retired - 1 >= outstanding) continue;
        bool own = in.loads && r == 0 && first < VECTORS;
        bool same = own && counter == (in.opcode->group == LDS ? LGKM : VM);
        if (same && !(counter == LGKM && i32(wave.scalar_load - retired) > 0)) continue;
        report(wave, found_register_before_wait, wave.exec, 0, first + i);
      }
    }
  }
}

}  // namespace emulator
