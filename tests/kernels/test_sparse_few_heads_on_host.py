"""The source of csrc/sm_90/sparse_decode/few_heads, executed on a CPU and compared with fp64 on keys rounded to bf16.

kernels_on_host.py says what such a run shows and what not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels_on_host import check, ran, with_a_fault
from kernels_on_host import compiled as compiled_program
from planted import each_of

FEW_HEADS = "sm_90/sparse_decode/few_heads"
PROBLEMS = {
    "dsv4": [
        "16 2 1 1 plain 64 3 97 16 4 140",
        "12 3 2 2 sink 7 20 70 32 9 45",
        "16 3 1 1 sharp 1 400 400",
        "3 5 1 2 absent 16 9 90 64 0 4",
        "9 4 3 2 lengths 16 9 40 64 2 50 5 9 33 1 9 3",
        "8 3 2 2 planned 64 2 128 64 3 100",
        "1 24 1 1 one 16 4 1",
    ],
    "v41any": [
        "16 2 1 1 plain 64 3 97 16f 4 140",
        "5 3 2 2 sink 7fi 20 70 32i 9 45",
        "16 3 1 1 sharp 1f 400 400",
        "8 3 2 2 planned 64 2 128 64f 3 100",
        "3 5 1 2 ragged 16f 9 90 64f 0 4",
        "1 24 1 1 one 16f 4 1",
    ],
    "v32": ["16 2 1 1 plain 64 3 97", "7 4 2 3 ragged 16 20 150 64 2 70", "1 9 1 1 one 64 4 1"],
    "v41": ["16 2 1 1 plain 64 3 97 16i 4 40", "5 3 2 2 absent 7i 20 70", "1 12 1 1 one 64 4 1"],
}
FAULT_PROBLEMS = [
    "5 4 1 1 absent 7 40 270",
    "12 2 1 1 sharp 1 400 400",
    "16 1 1 1 plain 64 6 3000",
    "3 5 1 2 absent 16 9 90",
]
"""Four work tiles in a row for one block; running maxima that are raised late; many steps; a short last step."""


def compiled(folder: Path, record: str, *first: Path) -> Path:
    """The program of an instance."""
    constants = {"KV_FORMAT": record, "FEW_HEADS": 1, "HOST_BLOCK_THREADS": 384}
    return compiled_program("sparse_records.cpp", folder / "few_heads", constants, *first)


@pytest.mark.parametrize(
    "record", ["dsv4", "v41any", *(pytest.param(record, marks=pytest.mark.full) for record in ("v32", "v41"))]
)
def test_results_are_those_of_fp64(tmp_path, record):
    program = compiled(tmp_path, record)
    for problem in PROBLEMS[record]:
        check(program, problem)


FAULTS = {
    "one P for two steps": ("mainloop.hpp", "p_stage_ ^= 1;", ""),
    "results over keys that are read": ("mainloop.hpp", "sync();  // all warps have multiplied the stage", ""),
    "absent keys seen": ("mainloop.hpp", "&& absent) s[i]", "&& absent && false) s[i]"),
    "keys of other warps": ("mainloop.hpp", "words + key / Traits::OWN_KEYS * 4", "words"),
    "O not rescaled": ("mainloop.hpp", "      sum_[i] *= factor;\n", "      sum_[i] *= factor;\n      continue;\n"),
    "a row's max of another": ("mainloop.hpp", "i == row / 8 * 2 + row % 2", "i == row / 8 * 2"),
    "scores read early": ("mainloop.hpp", "    wgmma_wait<0>();\n    pin_accumulator(s);", "    pin_accumulator(s);"),
    "queries of half the width": ("mainloop.hpp", "step / 2 * box + step % 2 * 32", "step / 2 * box"),
    "values of other keys": ("mainloop.hpp", "k * 2 * Traits::GROUP_BYTES)", "k * Traits::GROUP_BYTES)"),
}


@each_of(FAULTS, "absent keys seen", place=lambda header, right, broken: (f"{FEW_HEADS}/{header}", right))
def test_a_broken_kernel_is_found(tmp_path, name):
    header, right, broken = FAULTS[name]
    own = with_a_fault(tmp_path / "csrc", f"{FEW_HEADS}/{header}", right, broken)
    program = compiled(tmp_path, "dsv4", own)
    assert any(ran(program, problem).returncode != 0 for problem in FAULT_PROBLEMS)
