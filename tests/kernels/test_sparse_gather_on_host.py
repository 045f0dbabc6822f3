"""The source of sparse decode over bf16 rows on sm_90, run on a CPU and compared with fp64 (kernels_on_host.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels_on_host import check, ran, with_a_fault
from kernels_on_host import compiled as compiled_program
from planted import each_of

PRODUCER = "sm_90/sparse_decode/producer_gather.hpp"
PROBLEMS = {
    "bf16x576": [
        "64 3 200 1 1 16 plain",
        "20 5 40 1 2 1 lengths",
        "100 2 33 1 1 7 sink",
        "16 2 300 3 2 16 plain",
        "8 3 129 2 1 16 lengths",
        "64 2 96 1 1 16 sharp",
        "64 2 64 1 1 16 no_max",
    ],
    "bf16x512": ["64 3 200 1 1 16 lengths", "5 2 300 3 1 1 sink"],
}


def compiled(folder: Path, record: str, *first: Path) -> Path:
    """The program of an instance."""
    constants = {"KV_FORMAT": record, "HOST_BLOCK_THREADS": 512}
    return compiled_program("sparse_gather.cpp", folder / "gather", constants, *first)


@pytest.mark.parametrize("record", PROBLEMS)
def test_results_are_those_of_fp64(tmp_path, record):
    program = compiled(tmp_path, record)
    for problem in PROBLEMS[record]:
        check(program, problem)


FAULTS = {
    "stages overwritten": ("this->wait_for_empty(kv_);\n    copy_key", "copy_key"),
    "absent keys seen": ("present_ = __ballot_sync(~0u, token.present);", "present_ = ~0u;"),
    "keys not swizzled": ("(to ^ 4 << 4) + 4 * 128", "to + 4 * 128"),
}


@each_of(FAULTS, place=lambda right, broken: (PRODUCER, right))
def test_a_fault_is_found(tmp_path, name):
    own = with_a_fault(tmp_path / "csrc", PRODUCER, *FAULTS[name])
    assert ran(compiled(tmp_path, "bf16x576", own), "64 2 300 1 1 16 plain").returncode != 0
