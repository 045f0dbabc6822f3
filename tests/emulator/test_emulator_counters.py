"""Counters: by class, by loop, bank clocks of known patterns, bounds from an arch record."""

import numpy as np
import pytest

from mla_suite import archs as arch_records
from mla_suite.emulator import Memory, run_snippet

LANE = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize(
    ("instruction", "addresses", "clocks"),
    [
        ("ds_read_b32 v1, v0", LANE * 4, (2, 1)),
        ("ds_read_b32 v1, v0", LANE * 0, (2, 1)),
        ("ds_read_b32 v1, v0", LANE * 128, (64, 32)),
        ("ds_read_b32 v1, v0", LANE * 8, (4, 2)),
        ("ds_read_b64 v[2:3], v0", LANE * 8, (4, 2)),
        ("ds_read_b128 v[4:7], v0", LANE * 16, (8, 4)),
        ("ds_read_b128 v[4:7], v0", LANE * 128, (64, 32)),
        ("ds_write_b128 v0, v[4:7]", LANE * 16, (8, 8)),
    ],
)
def test_bank_clocks(arch, instruction, addresses, clocks):
    state = run_snippet(arch, [instruction, "s_waitcnt lgkmcnt(0)"], {"v0": addresses}, lds=np.zeros(8192, np.uint8))
    assert state.findings == ()
    assert state.report.lds_clocks() == clocks[0]
    assert state.report.lds_clocks(bytes_per_clock=256) == clocks[arch == "gfx950"]


def test_counts_and_bound_of_a_product(launch, arch):
    rng = np.random.default_rng(1)
    depth = 512
    a, b = (rng.integers(0, 1 << 14, (16, depth)).astype(np.uint16) for _ in range(2))
    out = np.empty((16, 16), np.float32)
    report = launch("matmul", 1, 64, {"a": (a, "r"), "b": (b, "r"), "out": (out, "w")}, depth)
    step = 16 if arch == "gfx942" else 32
    assert report.by_class()["matrix"] == depth // step
    assert report.instructions() == sum(report.by_class().values()) == sum(report.mix().values())
    assert report.loaded["a"] + report.loaded["b"] == a.nbytes + b.nbytes
    moved = sum(report.loaded.values()) + sum(report.stored.values())
    assert report.memory_bytes() == moved
    record = arch_records.get(arch)
    bound = report.bound(record)
    assert bound.matrix == depth // step * 16 / record.simds
    assert bound.memory == pytest.approx(
        moved * record.clock_mhz * 1e6 * record.compute_units / record.memory_bytes_per_s
    )
    assert bound.limiter == "memory"


def test_bytes_by_buffer(arch):
    x, y = np.zeros(64, np.uint32), np.zeros(64, np.uint64)
    lines = ["global_load_dword v2, v0, s[0:1]", "s_waitcnt vmcnt(0)", "global_store_dwordx2 v1, v[2:3], s[2:3]"]
    buffers = [Memory.of("x", x, "r"), Memory.of("y", y, "w")]
    registers = {"v0": LANE * 4, "v1": LANE * 8}
    state = run_snippet(
        arch, lines, registers, {"s0": x.ctypes.data, "s2": y.ctypes.data}, exec_mask=0xFFFF, buffers=buffers
    )
    assert state.findings == ()
    assert state.report.loaded == {"x": 64, "y": 0}
    assert state.report.stored == {"x": 0, "y": 128}
    assert state.report.memory_bytes() == 192


def test_a_workgroup_of_three_dimensions_has_all_its_waves(launch):
    arrays = {name: (np.zeros(4, np.float32), "rw") for name in ("a", "b", "out")}
    for block, waves in (((64, 1, 3), 3), ((32, 4, 2), 4), ((10, 3, 5), 3), (65, 2)):
        assert launch("add", 1, block, arrays, 0).times[0] == waves


def test_transcendental_clocks(arch):
    report = run_snippet(arch, ["v_exp_f32_e32 v0, v0", "v_add_f32_e32 v0, v0, v0"]).report
    assert report.valu_clocks() == 16 + 4
    assert report.by_class()["transcendental"] == 1
