"""The source of csrc/sm_90/sparse_decode/swap_ab, executed on a CPU and compared with fp64 on keys rounded to bf16.

As test_swap_ab_on_host.py executes decode's: the headers of tests/kernels/cuda_on_host take the place of sm_90/ptx.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from planted import each_of, plant
from test_swap_ab_on_host import HOST, compile_on_host, ran, translated

from mla_suite.archs import CSRC

SPARSE = "sm_90/sparse_decode"
INSTRUCTIONS = {
    "dequant.hpp": {
        r'asm\("\{.*?"r"\(pairs\[i\]\)\);': "values[i] = {fp16_to_float(pairs[i]), fp16_to_float(pairs[i] >> 16)};",
        r'asm\("cvt\.rn\.bf16x2.*?\)\);': "values[2 * i + j] = float_to_bf16(pairs[j].x * scale) |"
        " float_to_bf16(pairs[j].y * scale) << 16;",
        r'asm\("mul\.rn\.bf16x2.*?\)\);': "values[i] = 0;",  # of records that this kernel does not read
    },
    "topk_lists.hpp": {
        r'asm volatile\("st\.shared\.b32.*?"memory"\);': "st_shared(table_ + lane * 4, end);",
        r'asm volatile\("st\.shared\.b64.*?"memory"\);': "std::memcpy("
        "shared_at(table_ + 16 + lane * 8, 8), &first, 8);",
        r'asm volatile\("st\.shared\.v2.*?"memory"\);': "st_shared(table_ + TILE, first);"
        " st_shared(table_ + TILE + 4, end);",
        r'asm volatile\("ld\.shared\.v2.*?"memory"\);': "first = ld_shared<int>(table_ + TILE);"
        " end = ld_shared<int>(table_ + TILE + 4);",
        r'asm volatile\("ld\.shared\.b64.*?"memory"\);': "std::memcpy(&list,"
        " shared_at(table_ + 16 + pool_of(key) * 8, 8), 8);",
        r'asm volatile\("ld\.shared\.b32.*?"memory"\);': "first = ld_shared<int>(table_ + TILE);",
        r'asm volatile\("ld\.shared\.v4.*?"memory"\);': "std::memcpy(ends, shared_at(table_, 16), 16);",
    },
    "tile_scheduler.hpp": {
        r'asm volatile\("ld\.shared\.b32.*?"memory"\);': "value = ld_shared<int>(scratch_ + field);",
        r'asm volatile\("st\.shared\.b32.*?"memory"\);': "st_shared(scratch_ + field, value);",
    },
}
"""Headers with instructions of their own -> these, and what takes their place."""

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


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    sources = translated(tmp_path_factory.mktemp("sparse_swap_ab"))
    shutil.copytree(CSRC / SPARSE, sources / SPARSE)
    shutil.copytree(HOST / "gather" / "sm_90", sources / "sm_90", dirs_exist_ok=True)
    # beside them, because block.hpp includes tma.hpp
    for name in ("cuda.hpp", "arguments.hpp", "block.hpp", "decode_case.hpp", "sparse_swap_ab.cpp"):
        shutil.copy(HOST / name, sources)
    for name, changes in INSTRUCTIONS.items():
        path = sources / SPARSE / name
        text = path.read_text()
        for pattern, code in changes.items():
            text, count = re.subn(pattern, lambda _, code=code: code, text, flags=re.DOTALL)
            assert count == 1, f"{name}: {count} of {pattern}"
        path.write_text(text)
    return sources


def compiled(sources: Path, rows: int) -> Path:
    """The program of an instance."""
    program = sources.parent / f"sparse_swap_ab_{rows}"
    threads = {16: 512, 32: 384}[rows]
    constants = ["-DKV_FORMAT=v32", f"-DQ_ROWS={rows}", f"-DHOST_BLOCK_THREADS={threads}"]
    compile_on_host(sources, sources / "sparse_swap_ab.cpp", constants, program)
    return program


@pytest.mark.parametrize("rows", PROBLEMS)
def test_results_are_those_of_fp64(sources, rows):
    program = compiled(sources, rows)
    for problem in PROBLEMS[rows]:
        done = ran(program, problem)
        assert done.returncode == 0, f"{problem}: {done.stdout}{done.stderr}"


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


@each_of(FAULTS, "absent keys seen")
def test_a_broken_kernel_is_found(tmp_path, sources, name):
    header, right, broken = FAULTS[name]
    own = tmp_path / "csrc"
    shutil.copytree(sources, own)
    plant(own / SPARSE / "swap_ab" / header, right, broken)
    program = compiled(own, 16)
    assert any(ran(program, problem).returncode != 0 for problem in FAULT_PROBLEMS)
