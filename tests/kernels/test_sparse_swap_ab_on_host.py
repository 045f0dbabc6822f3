"""The source of csrc/sm_90/sparse_decode/swap_ab, executed on a CPU and compared with fp64 on keys rounded to bf16.

kernels_on_host.py says what such a run shows and what not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels_on_host import check, ran, with_a_fault
from kernels_on_host import compiled as compiled_program
from planted import each_of

SWAP_AB = "sm_90/sparse_decode/swap_ab"
PROBLEMS = {
    16: [
        "16 2 1 1 plain 64 6 300",
        "5 3 2 2 sink 7 20 161",
        "8 2 3 4 sharp 1 400 333 16 9 40",
        "16 4 1 2 absent 64 3 200",
        "11 5 2 3 ragged 16 20 150 64 2 70",
        "16 6 1 2 lengths 64 4 100 2 7 30 1 1 1 5 5 90",
        "16 3 2 2 planned 64 6 500",
        "1 9 1 2 one 64 4 1",
        "7 3 4 5 absent 64 1 65 64 0 4",
    ],
    32: ["24 2 1 1 plain 64 6 300", "32 3 3 2 sink 16 30 333", "17 4 1 2 ragged 64 4 200"],
}
FAULT_PROBLEMS = ["5 4 1 1 absent 7 40 270", "5 2 1 1 sharp 1 400 400", "5 1 1 1 plain 64 6 3000"]
"""Four work tiles in a row for one block, of five steps each; running maxima that are raised late; many steps."""


def compiled(folder: Path, rows: int, *first: Path) -> Path:
    """The program of an instance."""
    constants = {"KV_FORMAT": "v32", "Q_ROWS": rows, "HOST_BLOCK_THREADS": {16: 512, 32: 384}[rows]}
    return compiled_program("sparse_records.cpp", folder / "sparse_swap_ab", constants, *first)


@pytest.mark.parametrize("rows", PROBLEMS)
def test_results_are_those_of_fp64(tmp_path, rows):
    program = compiled(tmp_path, rows)
    for problem in PROBLEMS[rows]:
        check(program, problem)


FAULTS = {
    "keys overwritten early": ("mainloop.hpp", "if (c >= 2) wgmma_wait<1>();", "if (c >= 2) wgmma_wait<2>();"),
    "values overwritten early": ("mainloop.hpp", "wgmma_wait<VALUE_SETS - 1>();", "wgmma_wait<VALUE_SETS>();"),
    "values of the step before overwritten": ("mainloop.hpp", "if (c == 0) wait_for_vt();", ""),
    "odd columns at even ones' places": ("mainloop.hpp", "(vt_piece_ ^ 64) + 4 * 128", "vt_piece_ + 4 * 128"),
    "values not swizzled": ("lane_layout.hpp", "((2 * warp + matrix % 2) ^ t) * 16", "(2 * warp + matrix % 2) * 16"),
    "scores read early": ("mainloop.hpp", "    wgmma_wait<0>();\n    pin_accumulator(s);", "    pin_accumulator(s);"),
    "absent keys seen": ("mainloop.hpp", "mask_absent(s, present);\n  }", "static_cast<void>(present);\n  }"),
    "stages kept": ("mainloop.hpp", "if (!keeps_stages) release(kv);", ""),
    "O not rescaled": ("mainloop.hpp", "state_.rescale(i, exp2_approx(state_.max[i] - raised));", ""),
    "warpgroups not rescaled": ("merge.hpp", "state.rescale(i, factor_of(group_, count, Layout::row(i)));", ""),
    "results overwritten by keys": ("merge.hpp", "return group != 0;", "return false;"),
    "rope in the order of e4m3": ("queries.hpp", "(rope ? eight % 4 : eight / 2) * 4", "eight / 2 * 4"),
    "values of other keys": (
        "mainloop.hpp",
        "Layout::key_of_row(Layout::in_quad() * 2 + 1)",
        "Layout::key_of_row(Layout::in_quad() * 2)",
    ),
    "another step's indices": ("producer.hpp", "index = load_index(step + 2);", "index = load_index(step + 1);"),
}


@each_of(FAULTS, "absent keys seen", place=lambda header, right, broken: (f"{SWAP_AB}/{header}", right))
def test_a_broken_kernel_is_found(tmp_path, name):
    header, right, broken = FAULTS[name]
    own = with_a_fault(tmp_path / "csrc", f"{SWAP_AB}/{header}", right, broken)
    program = compiled(tmp_path, 16, own)
    assert any(ran(program, problem).returncode != 0 for problem in FAULT_PROBLEMS)
