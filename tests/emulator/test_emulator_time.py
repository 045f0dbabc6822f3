"""The model of time: single rules on a few lines of assembly, and planted slow-downs of a real kernel.

Beside it the time that the emulator itself takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from built import require_built

import mla_suite
from mla_suite import archs, emulator
from mla_suite.__main__ import main
from mla_suite.emulator import Emulator, assembly, core, timing
from mla_suite.emulator.machine import INSTRUCTION_LIMIT, SPIN_LIMIT, Memory, run
from mla_suite.emulator.program import Program
from mla_suite.ops.decode.samples import decode_sample

SINK = np.zeros(1024, np.uint32)


def clocks(
    lines: str, waves: int = 1, copies: int = 1, vectors: dict[int, np.ndarray] | None = None, **constants: float
) -> float:
    """What a compute unit of gfx950 takes for workgroups of some waves; v2 and v3 hold the address of `SINK`.

    `constants` are those of the model to change.
    """
    program = Program("gfx950", assembly.parse_body(f"{lines}\ns_endpgm", 0, "snippet"))
    registers, scalars = np.zeros((core.VECTORS, core.LANES), np.uint32), np.zeros(core.SCALARS, np.uint32)
    registers[2], registers[3] = SINK.ctypes.data & 0xFFFFFFFF, SINK.ctypes.data >> 32
    for index, values in (vectors or {}).items():
        registers[index] = values
    scalars[126:128] = 0xFFFFFFFF
    request, times = core.LaunchRequest(), np.zeros(1, np.dtype(core.GroupTime))
    model = timing.models(archs.get("gfx950"), 64, 0, 64 * waves, 1)[0]
    model.copies = copies
    for name, value in constants.items():
        setattr(model, name, value)
    request.mode, request.threads = 0xF0, 1
    request.spin_limit, request.instruction_limit = SPIN_LIMIT, INSTRUCTION_LIMIT
    request.initial_vectors, request.initial_scalars = registers.ctypes.data, scalars.ctypes.data
    final, scalars_after = np.zeros_like(registers), np.zeros(core.SCALARS + 1, np.uint32)
    lds = np.zeros(65536, np.uint8)
    request.final_vectors, request.final_scalars = final.ctypes.data, scalars_after.ctypes.data
    request.initial_lds, request.final_lds = lds.ctypes.data, lds.ctypes.data
    request.model, request.models, request.times = core.c.addressof(model), 1, times.ctypes.data
    run(program, request, (1, 1, 1), (64 * waves, 1, 1), lds.size, [Memory.of("sink", SINK, "rw")])
    return float(times["clocks"][0])


def repeat(count: int, *lines: str) -> str:
    return "\n".join("\n".join(lines).replace("#", str(8 + i)) for i in range(count))


ADDS = repeat(40, "v_add_f32 v#, v4, v5")
LOAD, WAIT, USE = "global_load_dword v60, v[2:3], off", "s_waitcnt vmcnt(0)", "v_add_f32 v61, v60, v4"
LANES = np.arange(64, dtype=np.uint32)


def test_a_wait_moved_up_exposes_the_latency_of_memory():
    late, early = (clocks("\n".join(order)) for order in ((LOAD, ADDS, WAIT, USE), (LOAD, WAIT, ADDS, USE)))
    assert early - late == 40 * 4


def test_dependent_instructions_wait_for_each_other():
    chain = repeat(40, "v_add_f32 v8, v8, v5")
    assert clocks(chain) - clocks(ADDS) == 39 * 4
    assert clocks(repeat(20, "v_exp_f32 v#, v4")) - clocks(repeat(20, "v_add_f32 v#, v4, v5")) == 19 * 12


def test_a_bank_conflict_takes_its_clocks():
    read = repeat(8, "ds_read_b32 v#, v1") + "\ns_waitcnt lgkmcnt(0)"
    free, conflicting = (clocks(read, vectors={1: LANES * step}) for step in (4, 128))
    assert conflicting - free == 8 * 64 - (7 * 4 + 2)  # without conflicts they arrive as fast as they are issued


def test_vector_instructions_run_beside_matrix_instructions():
    matrix = repeat(4, "v_mfma_f32_16x16x32_bf16 a[0:3], v[64:67], v[68:71], a[0:3]")
    other = repeat(4, "v_mfma_f32_16x16x32_bf16 a[0:3], v[64:67], v[68:71], a[0:3]", "v_add_f32 v#, v4, v5")
    assert clocks(matrix) == clocks(other) or clocks(other) - clocks(matrix) < 8
    assert clocks(matrix, waves=8) > 1.5 * clocks(matrix, waves=4)  # two waves of a SIMD have one matrix unit


def test_memory_keeps_its_rate_as_products_slow_the_clock():
    product = "v_mfma_f32_16x16x32_bf16 a[#:@], v[64:67], v[68:71], a[#:@]"
    products = "\n".join(product.replace("#", str(8 * i)).replace("@", str(8 * i + 3)) for i in range(2))
    work = "\n".join([f"{products}\n{LOAD}\ns_waitcnt vmcnt(14)"] * 200)
    steady, slowed = (clocks(work, waves=4, chip_rate=0.2, slowdown=slowdown) for slowdown in (0.0, 0.4))
    load = 200 * 2 * 16 / slowed  # of the matrix units: two products of a wave for each of its loads
    assert 0.3 < load < 0.6
    assert slowed == pytest.approx(steady * timing.matrix_clock(timing.CHIP, load), rel=0.05)


@pytest.mark.parametrize(("workgroups", "share"), [(1, 1 / 256), (64, 1 / 4), (256, 1.0)])
def test_the_clock_falls_with_the_load_of_the_whole_chip(workgroups: int, share: float):
    gfx950, times = archs.get("gfx950"), np.zeros(workgroups, np.dtype(core.GroupTime))
    times["clocks"], times["matrix"] = 240_000, 216_000
    found = timing.launch(gfx950, 1, [times] * 3)
    assert found.us - found.launch_us == pytest.approx(100 / timing.matrix_clock(timing.CHIP, 0.9 * share))
    model = timing.models(gfx950, 64, 0, 256, workgroups)[0]
    assert model.slowdown == pytest.approx(share * (1 - timing.CHIP.matrix_clock))


def test_row_tiles_share_what_their_keys_take_of_memory():
    """A workgroup of two, beside one that alone serves a sequence: its queries and results are its own."""
    clocks = {}
    for heads in (128, 256):
        args, kwargs = decode_sample([600], heads=heads, num_splits=1).make(torch.device("cpu"))
        with emulator.configured(collect=True, time=True) as reports, mla_suite.emulate("gfx942"):
            mla_suite.decode(*args, **kwargs)
        (clocks[heads],) = {float(group["memory"]) for group in reports[0].groups[0]}
    keys = 600 * 1152 / timing.UNITS["gfx942"].memory_rate
    assert clocks[128] - clocks[256] == pytest.approx(keys * (1 - timing.fetched(2)), rel=0.05)
    assert timing.fetched(2) == pytest.approx(0.5 + 0.5 * 5.3 / 17.2)


def test_a_barrier_waits_for_the_slowest_wave():
    assert clocks(f"s_barrier\n{LOAD}\n{WAIT}", waves=4) >= clocks(f"{LOAD}\n{WAIT}", waves=4) + 16


def test_an_occupancy_step_lost_costs_time():
    gfx942 = archs.get("gfx942")
    kept, lost = (timing.models(gfx942, registers, 0, 256, 10_000)[0].copies for registers in (256, 258))
    assert (kept, lost) == (2, 1)
    work = repeat(8, LOAD, WAIT, USE, "v_add_f32 v#, v4, v5")
    together, alone = clocks(work, waves=4, copies=2), clocks(work, waves=4)
    assert together < 1.1 * alone
    groups = np.zeros(2 * gfx942.compute_units, np.dtype(core.GroupTime))
    times = []
    for copies, each in ((kept, together), (lost, alone)):
        groups["clocks"] = each
        times.append(timing.launch(gfx942, copies, [groups]).us)
    assert times[0] < times[1]


def decode(arch: str, change: Callable[[str], str] | None = None, timed: bool = True) -> emulator.Report:
    """A decode of 256 keys in one workgroup, the text of every instruction changed by a function."""
    require_built(arch, "decode_dtype-bf16_rows-128_width-576_rotate-0")
    args, kwargs = decode_sample([256], heads=128, num_splits=1).make(torch.device("cpu"))
    launch = Emulator.launch

    def changed(machine: Emulator, program: Program, *rest: Any) -> emulator.Report:
        if change:
            lines = [replace(line, text=change(line.text)) for line in program.kernel.lines]
            program = Program(arch, replace(program.kernel, lines=lines))
        return launch(machine, program, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Emulator, "launch", changed)
        with emulator.configured(collect=True, time=timed, threads=1) as reports, mla_suite.emulate(arch):
            mla_suite.decode(*args, **kwargs)
    return reports[0]


def test_a_kernel_is_timed_only_where_asked(arch: str):
    plain, report = decode(arch, timed=False), decode(arch)
    assert plain.modelled is None
    assert (plain.times == report.times).all()
    time = report.modelled
    assert 0 < time.low <= time.us <= time.high < 500
    assert time.bound in timing.BOUNDS
    assert str(time).startswith("modelled ")
    assert "held-out median error" in str(time) or "unvalidated" in str(time)
    assert "unvalidated" in str(replace(time, arch="gfx942", bound="matrix"))
    assert replace(time, arch="gfx942", bound="matrix").as_dict()["held_out"] is None


def test_planted_slow_downs_of_a_real_kernel(arch: str):
    whole = decode(arch).modelled.us
    drained = decode(arch, lambda text: re.sub(r"lgkmcnt\(\d+\)", "lgkmcnt(0)", text)).modelled.us
    assert drained > 1.03 * whole
    slept = decode(arch, lambda text: "s_sleep 1" if text.startswith("s_nop") else text).modelled.us
    assert slept > whole


SENTENCE = r"modelled \d+\.\d us \(.*-bound: (held-out median error|unvalidated: )"


def test_commands_print_it_with_its_class(capsys: pytest.CaptureFixture[str]):
    require_built("gfx942", "decode_dtype-bf16_rows-16_width-576_rotate-0")
    assert main(["emulate", "decode", "--heads", "16", "--kv", "64", "--num-splits", "1", "--time"]) == 0
    assert re.search(f"^{SENTENCE}", capsys.readouterr().out, re.M)
    assert main(["explain", "decode", "--on", "gfx942", "--heads", "16", "--kv", "64", "--time"]) == 0
    assert re.search(f"^  {SENTENCE}", capsys.readouterr().out, re.M)
    shape = "b2-h16-q1-kv64-p64-bf16"
    assert main(["bench", "--on", "gfx942", "--op", "decode", "--shapes", shape]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^decode-{shape} native +{SENTENCE}.*; error \S+$", printed, re.M)
    assert "Modelled times of an emulated gfx942: nothing is measured." in printed


@pytest.mark.parametrize("command", [["explain", "decode", "--time"], ["bench"]])
def test_a_time_is_modelled_of_emulated_archs_alone(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*command, "--on", "sm_90"]) == 2
    assert "emulate: sm_90 is not emulated" in capsys.readouterr().err


def loop():
    total = 0
    for number in range(1_000_000):
        total += number * number % 7
    return total


def least(call):
    """The least processor time of this thread in a few calls: neither other processes nor a slow machine count."""
    taken = []
    for _ in range(3):
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return min(taken)


@pytest.mark.parametrize(("heads", "loops"), [(16, 2), (128, 12)])
def test_the_emulator_decodes_1024_keys_in_the_time_of_a_loop_of_python(arch, heads, loops):
    """On one core, every check on."""
    require_built(arch, f"decode_dtype-bf16_rows-{heads}_width-576_rotate-0")
    args, kwargs = decode_sample((1024,), heads=heads, num_splits=1).make(torch.device("cpu"))
    with mla_suite.emulate(arch), emulator.configured(threads=1, collect=True) as launches:
        took = least(lambda: mla_suite.decode(*args, **kwargs))
    assert len(launches) == 3, "the emulator ran each call"
    assert took < loops * least(loop)


def test_the_model_takes_at_most_three_times_the_emulation():
    args, kwargs = decode_sample([600, 256], heads=16, num_splits=2).make(torch.device("cpu"))
    taken = {}
    for timed in (False, True):
        with mla_suite.emulate("gfx942"), emulator.configured(threads=1, collect=True, time=timed):
            taken[timed] = least(lambda: mla_suite.decode(*args, **kwargs))
    assert taken[True] < 3 * taken[False]


def test_bench_names_the_emulated_arch_in_its_file(arch: str, tmp_path: Path) -> None:
    """The device that is named beside it is the CPU that the emulator ran on, whatever the arch."""
    require_built(arch)
    file = tmp_path / "modelled.csv"
    assert main(["bench", "--on", arch, "--op", "combine", "--csv", str(file)]) == 0
    assert f"# emulated: {arch}\n" in file.read_text()
