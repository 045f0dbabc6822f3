"""e4m3 queries and keys that decode on sm_90 multiplies as they are stored, executed on a CPU and compared with fp64.

kernels_on_host.py says what such a run shows and what not: here the sums of fp8 products have all bits of fp32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels_on_host import HostKernel, check

KERNEL = HostKernel("dense.cpp", "sm_90/decode")
CONSTANTS = {"DTYPE": "fp8", "KV_SOURCE": "fp8_scores", "HOST_BLOCK_THREADS": 512}
PROBLEMS = [
    "16 1 64 1 1 plain 128 300 1 0 33 64",
    "64 1 32 3 2 sink 70 1 0 330",
    "8 2 32 1 3 ragged 100 30 200",
    "48 1 64 3 2 planned 100 330 200",
    "100 1 96 2 1 all_keys 300 65",
    "40 1 64 1 1 sharp 300",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return KERNEL.compiled(tmp_path_factory.mktemp("fp8_scores"), CONSTANTS)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_results_are_those_of_fp64(program, problem):
    check(program, problem)


FAULTS = {
    "half of a row's queries twice": ("q_as_stored.hpp", "&steps_[4 * (half * HALF_STEPS + k)]", "&steps_[4 * k]"),
    "pieces of one side": ("q_as_stored.hpp", "row * PITCH + side * 16;", "row * PITCH;"),
    "blocks of 16-bit keys": ("q_as_stored.hpp", "k / 2 * Traits::RAW_BLOCK_BYTES", "k / 4 * Traits::RAW_BLOCK_BYTES"),
    "values in another order": ("producer_fp8.hpp", "((part ^ key / 2 % 4) << 4)", "(part << 4)"),
    "a stage copied while scores are made of it": (
        "kernel.hpp",
        "Traits::SCORES_AS_STORED ? 256 : 128",
        "128",
    ),
    "scores of the stage before": ("mainloop_qk.hpp", "SCORES_AS_STORED) raw_.next();", "SCORES_AS_STORED) ;"),
    "values behind the last key stay": ("producer_fp8.hpp", "if (count < BLOCK_N) clear_absent(count, to);", ""),
}


@KERNEL.each_of(FAULTS, "half of a row's queries twice")
def test_a_fault_is_found(tmp_path, name):
    problems = "64 1 64 1 1 plain 300 90", "64 1 32 1 2 planned 700 40 330"
    KERNEL.assert_found(tmp_path, CONSTANTS, FAULTS[name], problems)
