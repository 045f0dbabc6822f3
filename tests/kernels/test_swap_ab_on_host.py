"""The source of csrc/sm_90/decode/swap_ab, executed on a CPU and compared with fp64 (kernels_on_host.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernels_on_host import check, ran, with_a_fault
from kernels_on_host import compiled as compiled_program
from planted import each_of

from mla_suite.archs import CSRC

DECODE = "sm_90/decode"
MAINLOOP = f"{DECODE}/swap_ab/mainloop.hpp"
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


def compiled(folder: Path, dtype: str, rows: int, *first: Path, max_tries: int | None = None) -> Path:
    """The program of an instance; with `max_tries`, as a debug build's waits are."""
    constants = {"MASKED": 1, "DTYPE": dtype, "Q_ROWS": rows}
    constants |= {} if max_tries is None else {"MLA_MAX_TRIES": max_tries}
    return compiled_program("swap_ab.cpp", folder / "swap_ab", constants, *first)


@pytest.mark.parametrize(("dtype", "rows"), INSTANCES)
def test_results_are_those_of_fp64(tmp_path, dtype, rows):
    program = compiled(tmp_path, dtype, rows)
    for problem in PROBLEMS[rows]:
        check(program, problem)


def broken_mainloop(folder: Path, right: str, broken: str) -> Path:
    return with_a_fault(folder / "csrc", MAINLOOP, right, broken)


FAULTS = {
    "keys overwritten early": ("if (group >= 2) wgmma_wait<1>();", "if (group >= 2) wgmma_wait<2>();"),
    "NaN behind the end": ("clear_absent(stages - 1, used", "if (false) clear_absent(stages - 1, used"),
    "scores read early": ("    wgmma_wait<0>();\n    pin_accumulator(s);", "    pin_accumulator(s);"),
    "a stage kept": (
        "      release();\n    }\n    wgmma_wait<0>();",
        "      kv_.next();\n    }\n    wgmma_wait<0>();",
    ),
}


WINDOW_FAULTS = {
    "NaN before the window": ("swap_ab/mainloop.hpp", "      clear_absent(0, 0, given.first_key - first);\n", ""),
    "pages before the window": ("swap_ab/producer.hpp", "max(skipped, 0) & -run", "0"),
    "a window too wide": ("query_rows.hpp", "queries.count - token, params", "queries.count, params"),
    "a mask that ends early": (
        "query_rows.hpp",
        "first < first_key(tile.length, 1,",
        "first < first_key(tile.length, 40,",
    ),
}


@each_of(WINDOW_FAULTS, place=lambda header, right, broken: (f"{DECODE}/{header}", right))
def test_a_broken_window_is_found(tmp_path, name):
    header, right, broken = WINDOW_FAULTS[name]
    own = with_a_fault(tmp_path / "csrc", f"{DECODE}/{header}", right, broken)
    program = compiled(tmp_path, "fp16", 16, own)
    # The second has a window that begins in a group of keys which the last query token sees to its end.
    found = [ran(program, problem) for problem in ("5 3 1 3 2 window100 270 1 0 161 500", "5 3 1 1 2 window200 500")]
    assert any(done.returncode for done in found), found


@each_of(FAULTS, place=lambda right, *_: (MAINLOOP, right))
def test_a_broken_mainloop_is_found(tmp_path, name):
    own = broken_mainloop(tmp_path, *FAULTS[name])
    assert ran(compiled(tmp_path, "fp16", 16, own), "5 3 7 1 2 sink 70 1 0 161 500").returncode != 0


MAX_TRIES = 4000  # of a wait, one in each round in which its warp does not sleep
PLANNED = "16 1 16 3 2 planned 100 330 200"


def test_no_wait_of_a_sound_block_traps_in_a_debug_build(tmp_path):
    check(compiled(tmp_path, "fp16", 16, max_tries=MAX_TRIES), PLANNED)


NEVER_ENDED = {
    "no stage is released": (*FAULTS["a stage kept"], "wait_for_tma_stage"),
    "no work tile is released": ("    mbarrier_arrive(barriers_.tile_empty(tiles_.stage));\n", "", "publish"),
}


@each_of(NEVER_ENDED, "no stage is released", place=lambda right, *_: (MAINLOOP, right))
def test_a_wait_that_nothing_ends_traps_in_a_debug_build(tmp_path, name):
    """The line that the driver prints for a device-side assert names the wait, the block and the thread."""
    right, broken, where = NEVER_ENDED[name]
    own = broken_mainloop(tmp_path, right, broken)
    done = ran(compiled(tmp_path, "fp16", 16, own, max_tries=MAX_TRIES), PLANNED)
    assert done.returncode == 3, done.stdout
    producer = (CSRC / DECODE / "producer.hpp").read_text().splitlines()
    line = re.fullmatch(
        rf"\S+/sm_90/decode/producer\.hpp:(\d+): {where}: block: \[0,0,0\], thread: \[\d+,0,0\] "
        r"Assertion `an mbarrier's phase is complete` failed\.\n",
        done.stderr,
    )
    assert line is not None, done.stderr
    assert "mbarrier_wait(" in producer[int(line[1]) - 1]
