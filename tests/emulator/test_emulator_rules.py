"""Rules of the sanitizer that a few lines break; the others are in test_emulator_kernels.py and instructions/."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mla_suite.archs import CSRC
from mla_suite.emulator import Memory, core, run_snippet
from mla_suite.emulator.report import _EXPLANATIONS, Finding

LANE = np.arange(64, dtype=np.uint32)
WORDS = np.arange(256, dtype=np.uint32)
HERE = Path(__file__).parent


def kinds(state):
    return {finding.kind for finding in state.findings}


def test_every_rule_has_a_name_a_sentence_a_line_in_the_readme_and_a_test():
    rules = set(core.load().findings)
    assert rules == set(_EXPLANATIONS)
    table = (CSRC / "emulator" / "README.md").read_text().split("## The rules that are checked")[1]
    rows = re.findall(r"^\| ([a-z_0-9, ]+) \|", table.split("**Order between")[0], re.M)
    assert {name for row in rows for name in row.split(", ")} - {"rule"} == rules
    tests = "".join(path.read_text() for path in HERE.rglob("*.py"))
    assert {rule for rule in rules if f'"{rule}"' not in tests} == set()


def test_a_finding_says_where_it_was_and_how_often():
    every = Finding("lds_race", "k", "ds_read_b32 v1, v0", "k.hip:3", 5, 2, (1 << 64) - 1, "0x8", 7, "touched")
    assert (
        str(every) == "lds_race: k: `ds_read_b32 v1, v0` at k.hip:3: touched (workgroup 5, wave 2, all lanes, 7 times)"
    )
    once = replace(every, source="", lanes=0b101 << 61, count=1)
    assert str(once) == "lds_race: k: `ds_read_b32 v1, v0`: touched (workgroup 5, wave 2, lanes 61,63)"
    assert str(replace(every, lanes=0x1FF)).endswith("lanes 0,1,2,3,4,5,6,7,..., 7 times)")
    assert str(replace(every, instruction="")) == "lds_race: k: touched", "of the launch as a whole"


@pytest.mark.parametrize("line", ["ds_read_b32 v1, v0", "ds_write_b32 v0, v1", "ds_add_u32 v0, v1"])
def test_lds_out_of_bounds(arch, line):
    state = run_snippet(arch, line, {"v0": LANE * 4 + 8}, lds=WORDS[:64])
    (finding,) = state.findings
    assert finding.kind == "lds_out_of_bounds"
    assert finding.lanes == 0b11 << 62
    assert finding.address == "0x100"
    if "write" in line or "add" in line:
        np.testing.assert_array_equal(state.lds.view(np.uint32)[:2], WORDS[:2])


def loaded_to_lds(arch, what, start, offsets, **options):
    lines = [f"s_mov_b32 m0, {start}", "s_nop 0", f"global_load_lds_{what} v0, s[0:1]", "s_waitcnt vmcnt(0)"]
    options |= {"lds": 256, "buffers": [Memory.of("x", WORDS, "r")]}
    return run_snippet(arch, lines, {"v0": offsets}, {"s0": WORDS.ctypes.data}, **options)


def test_a_load_to_lds_out_of_bounds(arch):
    state = loaded_to_lds(arch, "dword", 8, LANE * 4)
    assert kinds(state) == {"lds_out_of_bounds"}
    assert state.findings[0].lanes == 0b11 << 62
    np.testing.assert_array_equal(state.lds.view(np.uint32)[2:], WORDS[:62])


@pytest.mark.parametrize(
    ("line", "step", "expected"),
    [
        ("ds_read_b64 v[2:3], v0", 4, {"lds_misaligned"}),
        ("ds_read_b64 v[2:3], v0", 8, set()),
        ("ds_write_b128 v0, v[4:7]", 8, {"lds_misaligned"}),
        ("ds_write_b128 v0, v[4:7]", 16, set()),
        ("ds_read_b96 v[4:6], v0", 4, set()),
        ("ds_write_b16 v0, v4", 1, {"lds_misaligned"}),
        ("ds_max_u32 v0, v4", 2, {"lds_misaligned"}),
    ],
)
def test_lds_misaligned(arch, line, step, expected):
    state = run_snippet(arch, line, {"v0": step}, lds=WORDS, exec_mask=1)
    assert kinds(state) == expected


@pytest.mark.parametrize(("start", "expected"), [(2, {"lds_misaligned"}), (8, set())])
def test_loads_to_lds_come_to_whole_dwords(start, expected):
    assert kinds(loaded_to_lds("gfx950", "dwordx4", start, 0, exec_mask=1)) == expected


@pytest.mark.parametrize(
    ("line", "offset", "expected"),
    [
        ("global_load_dword v2, v0, s[0:1]", 2, {"global_misaligned"}),
        ("global_load_dwordx4 v[4:7], v0, s[0:1]", 4, set()),
        ("global_load_ushort v2, v0, s[0:1]", 1, {"global_misaligned"}),
        ("global_store_dword v0, v3, s[0:1]", 1, {"global_misaligned"}),
        ("global_atomic_add_x2 v0, v[4:5], s[0:1]", 4, {"global_misaligned"}),
        ("s_load_dword s8, s[0:1], 0x2", 0, {"global_misaligned"}),
    ],
)
def test_global_misaligned(arch, line, offset, expected):
    data = WORDS.copy()
    data = data[(-data.ctypes.data // 4) % 2 :]  # from a multiple of 8 on
    state = run_snippet(
        arch, line, {"v0": offset}, {"s0": data.ctypes.data}, exec_mask=1, buffers=[Memory.of("x", data, "rw")]
    )
    assert kinds(state) == expected


BETWEEN = {
    "read left": (["load_dword v2, v0, s[0:1] offset:4"], set(), {"left": 256}, {}),
    "write right": (["store_dword v0, v1, s[0:1] offset:12"], set(), {}, {"right": 256}),
    "write left": (["store_dword v0, v1, s[0:1] offset:4"], {"global_read_only"}, {}, {}),
    "read right": (["load_dword v2, v0, s[0:1] offset:8"], {"global_uninitialised"}, {"right": 256}, {}),
    "write, then read right": (
        *(["store_dwordx2 v0, v[0:1], s[0:1] offset:8", "load_dword v2, v0, s[0:1] offset:8"], set()),
        *({"right": 256}, {"right": 512}),
    ),
    "across": (["load_dwordx2 v[2:3], v0, s[0:1] offset:4"], {"global_out_of_bounds"}, {}, {}),
    "whole rows": (["load_dwordx2 v[2:3], v0, s[0:1]"], set(), {"left": 512}, {}),
    "below": (["load_dword v2, v0, s[0:1] offset:16"], {"global_out_of_bounds"}, {"left": 252}, {}),
}
"""Accesses of global memory, their findings, and the bytes that they load and store."""


@pytest.mark.parametrize("what", BETWEEN)
def test_buffers_that_lie_between_each_other(arch, what):
    """The left columns may be read, the right ones hold nothing yet; no buffer owns the row below the last."""
    accesses, expected, loaded, stored = BETWEEN[what]
    rows = np.zeros((65, 4), np.uint32)[:64]
    buffers = [Memory.of("left", rows[:, :2], "r"), Memory.of("right", rows[:, 2:], "w")]
    lines = [*(f"global_{access}" for access in accesses), "s_waitcnt vmcnt(0)"]
    registers = {"v0": LANE * 16, "v1": 7}
    state = run_snippet(arch, lines, registers, {"s0": rows.ctypes.data}, buffers=buffers)
    assert kinds(state) == expected
    assert state.report.loaded == {"left": 0, "right": 0} | loaded
    assert state.report.stored == {"left": 0, "right": 0} | stored


def test_a_writable_part_of_a_buffer_that_may_be_read(arch):
    data = WORDS.copy()
    buffers = [Memory.of("all of it", data, "r"), Memory.of("part", data[64:128], "rw")]
    for offset, expected in ((256, set()), (0, {"global_read_only"}), (512, {"global_read_only"})):
        line = f"global_store_dword v0, v0, s[0:1] offset:{offset}"
        state = run_snippet(arch, line, {"v0": LANE * 4}, {"s0": data.ctypes.data}, buffers=buffers)
        assert kinds(state) == expected
    np.testing.assert_array_equal(data, np.concatenate([WORDS[:64], LANE * 4, WORDS[128:]]))


@pytest.mark.parametrize(
    "line",
    [
        "global_load_dword v50, v51, s[0:1]",
        "global_store_dword v51, v0, s[0:1]",
        "global_atomic_add v51, v0, s[0:1]",
        "buffer_load_dword v50, v51, s[0:3], 0 offen",
        "buffer_atomic_add v0, v51, s[0:3], 0 offen",
        "ds_read_b32 v50, v51",
        "ds_write_b32 v51, v0",
        "ds_add_u32 v51, v0",
        "scratch_load_dword v50, v51, off",
        # The loaded element was written, its neighbour was not.
        "global_load_dword v50, v0, s[0:1]\n\tds_write_b32 v51, v0",
        "global_load_dword v50, v0, s[0:1] sc1\n\tds_write_b32 v51, v0",
        "buffer_load_dword v50, v0, s[0:3], 0 offen\n\tds_write_b32 v51, v0",
        "ds_read_b32 v50, v0\n\tds_write_b32 v51, v0",
        "global_atomic_add v50, v0, v0, s[0:1] sc0\n\tds_write_b32 v51, v0",
    ],
)
def test_an_address_that_was_never_written(launch, line):
    """A kernel may count on v0 alone."""
    arrays = {"a": (np.zeros(256, np.float32), "r"), "b": (np.zeros(256, np.float32), "r")}
    arrays["out"] = (np.zeros(256, np.float32), "rw")
    begin = re.search(r"^add:.*$", launch.text, re.M).end()
    expected = {"uninitialised_address"}
    for text, found in ((f"\t{line}", True), (f"\tv_mov_b32_e32 v51, 0\n\t{line}", False)):
        changed = f"{launch.text[:begin]}\n{text}\n\ts_waitcnt vmcnt(0) lgkmcnt(0)\n{launch.text[begin:]}"
        report = launch("add", 1, 256, arrays, 256, text=changed)
        seen = {finding.kind: finding for finding in report.findings}
        assert (expected <= set(seen)) == found, (text, set(seen))
        if found:
            assert seen["uninitialised_address"].explanation.startswith("v51 is an address")


@pytest.mark.parametrize(("word", "bit"), [(1, 31), (3, 23)], ids=["swizzle", "thread ids"])
def test_bad_resource(arch, word, bit):
    data = WORDS.copy()
    plain = data.ctypes.data | data.nbytes << 64 | 0x00027000 << 96
    for resource, expected in ((plain, set()), (plain | 1 << 32 * word + bit, {"bad_resource"})):
        line = "buffer_load_dword v1, v0, s[4:7], 0 offen"
        state = run_snippet(arch, line, {"v0": LANE * 4}, {"s4": resource}, buffers=[Memory.of("x", data, "r")])
        assert kinds(state) == expected


def test_rounding_mode(arch):
    for mode, expected in ((0, set()), (1, {"rounding_mode"}), (12, {"rounding_mode"})):
        assert kinds(run_snippet(arch, f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), {mode}")) == expected
