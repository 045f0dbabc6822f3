"""The source of decode over narrow latents on sm_90, executed on a CPU and compared with fp64.

kernels_on_host.py says what such a run shows and what not.
"""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel

KERNEL = HostKernel("dense.cpp", "sm_90/decode")
WIDTHS = {320: 256, 288: 256, 160: 128}
SOURCES = [("bf16", "tma"), ("bf16", "cp_async"), ("bf16", "fp8"), ("fp8", "fp8")]
POINTS = [(width, *source) for width in WIDTHS for source in SOURCES]
ALWAYS = [(288, "bf16", "tma"), (160, "bf16", "cp_async"), (160, "fp8", "fp8")]
POINTS = [point if point in ALWAYS else pytest.param(*point, marks=pytest.mark.full) for point in POINTS]
PROBLEMS = [
    "16 1 64 1 1 plain 128 700 1 0 33 64",
    "64 1 32 3 2 sink 70 1 0 330",
    "8 2 32 1 3 ragged 100 30 200",
    "16 1 64 3 2 planned 100 330 200",
    "100 1 64 2 1 all_keys 300 65",
]


def constants(width, dtype, source):
    return {"DTYPE": dtype, "KV_SOURCE": source, "D_QK": width, "D_V": WIDTHS[width], "HOST_BLOCK_THREADS": 512}


@pytest.mark.parametrize(("width", "dtype", "source"), POINTS)
def test_results_are_those_of_fp64(tmp_path, width, dtype, source):
    problems = [problem.replace(" 64 ", " 7 ", 1) if source == "cp_async" else problem for problem in PROBLEMS]
    KERNEL.check(tmp_path, constants(width, dtype, source), problems)


FAULTS = {
    "a block of the map twice": (
        "tma",
        "prologue_prefetch.hpp",
        "WHOLE_BLOCKS ? 0 : block * 64",
        "WHOLE_BLOCKS ? 0 : 0",
    ),
    "columns of the other warpgroup": ("tma", "mainloop_pv.hpp", ": group * COLUMNS)", ": group * 2 * COLUMNS)"),
    "queries of half a row": ("tma", "q_operand.hpp", "HALF = 2 * Traits::Q_BOXES;", "HALF = Traits::Q_STEPS / 2;"),
    "values behind the last key stay": (
        "tma",
        "mainloop_qk.hpp",
        "      clear_values(stage_multiplied_last(), tile_.end_key - first, BLOCK_N);\n",
        "      ;\n",
    ),
    "buffers in a stage": (
        "tma",
        "traits.hpp",
        "<= STAGE_BYTES ? 0 : 8 * OUT_BUFFER_BYTES;",
        "<= STAGE_BYTES ? 0 : 0;",
    ),
    "the next row copied": ("cp_async", "producer_cp_async.hpp", "valid && in_row(c)", "valid"),
    "the next query converted": (
        "fp8",
        "producer_fp8.hpp",
        "half == 1 ? Traits::LAST_Q_BOXES",
        "half == 1 ? Traits::Q_BOXES",
    ),
    "a raw stage too many": (
        "fp8",
        "producer_fp8.hpp",
        "copied_ - converted_ < AHEAD",
        "copied_ - converted_ <= AHEAD",
    ),
}


@KERNEL.each_of({name: fault for name, (_, *fault) in FAULTS.items()})
def test_a_fault_is_found(tmp_path, name):
    source, *fault = FAULTS[name]
    instance = constants(160, "fp8" if source == "fp8" else "bf16", source)
    KERNEL.assert_found(tmp_path, instance, fault, ["16 1 64 1 1 plain 300 33 90", "64 1 32 1 1 plain 700 700"])
