"""The source of csrc/sm_90/decode/swap_ab, executed on a CPU and compared with fp64 (kernels_on_host.py)."""

from __future__ import annotations

import re

import pytest
from kernels_on_host import HostKernel, ran, with_a_fault

from mla_suite.archs import CSRC

KERNEL = HostKernel("swap_ab.cpp", "sm_90/decode")
FULL = pytest.mark.full
INSTANCES = [
    pytest.param("bf16", 16, marks=FULL),
    ("fp8", 16),
    pytest.param("fp16", 32, marks=FULL),
    ("bf16", 32),
]
PROBLEMS = {
    16: [
        "16 1 64 1 1 plain 128 300 1 0 33 64",
        "5 3 7 1 2 sink 70 1 0 161 500",
        "8 2 1 3 4 sharp 700 100",
        "8 2 16 1 3 ragged 100 30 200",
        "16 1 16 3 2 planned 100 330 200",
        "7 2 48 2 1 all_keys 300 65",
        "16 1 64 1 1 wide 200 33",
        "16 1 64 2 1 descaled 200 33",
        "16 1 64 1 1 descaled_nan 100 33",
        "16 1 64 2 1 window40 128 300 1 0 33 64",
        "8 2 1 3 2 ragged+planned+window200 700 100 201",
        "4 4 16 3 2 planned+tree 300 65 4",
    ],
    32: ["8 4 48 2 3 plain 400 31 257 4", "24 1 16 1 1 sink 300 65", "8 4 5 1 2 ragged 100 30 200"],
}


def constants(dtype="fp16", rows=16, **debug):
    """Those of an instance; with MLA_MAX_TRIES its waits are as a debug build's."""
    return {"MASKED": 1, "DTYPE": dtype, "Q_ROWS": rows, **debug}


@pytest.mark.parametrize(("dtype", "rows"), INSTANCES)
def test_results_are_those_of_fp64(tmp_path, dtype, rows):
    KERNEL.check(tmp_path, constants(dtype, rows), PROBLEMS[rows])


MAINLOOP = "swap_ab/mainloop.hpp"
RELEASED = "      release();\n    }\n    wgmma_wait<0>();"
FAULTS = {
    "keys overwritten early": (MAINLOOP, "if (group >= 2) wgmma_wait<1>();", "if (group >= 2) wgmma_wait<2>();"),
    "NaN behind the end": (MAINLOOP, "clear_absent(stages - 1, used", "if (false) clear_absent(stages - 1, used"),
    "scores read early": (MAINLOOP, "    wgmma_wait<0>();\n    pin_accumulator(s);", "    pin_accumulator(s);"),
    "a stage kept": (MAINLOOP, RELEASED, RELEASED.replace("release()", "kv_.next()")),
    "NaN before the window": (MAINLOOP, "      clear_absent(0, 0, given.first_key - first);\n", ""),
    "pages before the window": ("swap_ab/producer.hpp", "max(skipped, 0) & -run", "0"),
    "a window too wide": ("query_rows.hpp", "queries.count - token, params", "queries.count, params"),
    "a mask that ends early": (
        "query_rows.hpp",
        "first < first_key(tile.length, 1,",
        "first < first_key(tile.length, 40,",
    ),
}
SHOWN_BY = [
    *("5 3 7 1 2 sink 70 1 0 161 500", "5 3 1 3 2 window100 270 1 0 161 500"),
    "5 3 1 1 2 window200 500",  # which begins in a group of keys that the last query token sees to its end
]


@KERNEL.each_of(FAULTS)
def test_a_fault_is_found(tmp_path, name):
    KERNEL.assert_found(tmp_path, constants(), FAULTS[name], SHOWN_BY)


MAX_TRIES = 4000  # of a wait, one in each round in which its warp does not sleep
PLANNED = "16 1 16 3 2 planned 100 330 200"


def test_no_wait_of_a_sound_block_traps_in_a_debug_build(tmp_path):
    KERNEL.check(tmp_path, constants(MLA_MAX_TRIES=MAX_TRIES), [PLANNED])


NEVER_ENDED = {
    "no stage is released": (*FAULTS["a stage kept"], "wait_for_tma_stage"),
    "no work tile is released": (MAINLOOP, "    mbarrier_arrive(barriers_.tile_empty(tiles_.stage));\n", "", "publish"),
}


@KERNEL.each_of({name: tuple(fault) for name, (*fault, _) in NEVER_ENDED.items()}, "no stage is released")
def test_a_wait_that_nothing_ends_traps_in_a_debug_build(tmp_path, name):
    """The line that the driver prints for a device-side assert names the wait, the block and the thread."""
    header, right, broken, where = NEVER_ENDED[name]
    own = with_a_fault(tmp_path / "csrc", f"{KERNEL.folder}/{header}", right, broken)
    done = ran(KERNEL.compiled(tmp_path, constants(MLA_MAX_TRIES=MAX_TRIES), own), PLANNED)
    assert done.returncode == 3, done.stdout
    producer = (CSRC / KERNEL.folder / "producer.hpp").read_text().splitlines()
    line = re.fullmatch(
        rf"\S+/sm_90/decode/producer\.hpp:(\d+): {where}: block: \[0,0,0\], thread: \[\d+,0,0\] "
        r"Assertion `an mbarrier's phase is complete` failed\.\n",
        done.stderr,
    )
    assert line is not None, done.stderr
    assert "mbarrier_wait(" in producer[int(line[1]) - 1]
