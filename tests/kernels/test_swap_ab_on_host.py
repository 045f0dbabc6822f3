"""The source of csrc/sm_90/decode/swap_ab, executed on a CPU and compared with fp64.

The headers of tests/kernels/cuda_on_host take the place of sm_90/ptx: they say what each instruction does. Threads are
fibers in an order that changes, copies arrive late, and a wgmma reads its operands only when a wait ends it. What a GPU
adds, such as descriptors as hardware reads them, visibility of memory and time, is not seen.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from planted import each_of, plant

from mla_suite.archs import CSRC

HOST = Path(__file__).parent / "cuda_on_host"
DECODE = "sm_90/decode"
INSTRUCTIONS = {
    "producer.hpp": {
        r'asm volatile\("st\.shared\.v4.*?"memory"\);': "st_shared_v4(to, tile.sequence, tile.length, tile.first_key,"
        " tile.end_key);",
        r'asm volatile\("st\.shared\.v2.*?"memory"\);': "st_shared(to + 16, tile.partial_row);"
        " st_shared(to + 20, info);",
    },
    "softmax.hpp": {r'asm\("ex2\.approx.*?\)\);': "y = std::exp2(x); if (y < 0x1p-126f) y = 0.0f;"},
    "convert_fp8.hpp": {
        r'asm\("\{[^{]*\{low, high\}, %2;(?:(?!asm).)*?"r"\(stored\)\);': "const auto of_two = [](uint32_t two) {"
        " return float_to_fp16(e4m3_to_float(two)) | float_to_fp16(e4m3_to_float(two >> 8)) << 16; };"
        " first = of_two(stored); last = of_two(stored >> 16);",
        r'asm\("\{.*?"r"\(pair\)\);': "low = high = 0;",
    },
    "cluster/none.hpp": {r'asm volatile\("st\.shared\.v4.*?"memory"\);': "st_shared_v4(to, 0, 0, 0, 0);"},
}
"""Headers with instructions of their own -> these, and what takes their place."""

INSTANCES = [("bf16", 16), ("fp8", 16), ("fp16", 32), ("bf16", 32)]
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
    ],
    32: ["8 4 48 2 3 plain 400 31 257 4", "24 1 16 1 1 sink 300 65", "8 4 5 1 2 ragged 100 30 200"],
}


def translated(folder: Path) -> Path:
    """A copy of the sources whose own instructions are C++."""
    sources = folder / "csrc"
    shutil.copytree(CSRC / "common", sources / "common")
    shutil.copytree(CSRC / DECODE, sources / DECODE)
    shutil.copytree(CSRC / "sm_90" / "ptx", sources / "sm_90" / "ptx")
    shutil.copy(CSRC / "sm_90" / "spin_limit.hpp", sources / "sm_90")
    shutil.copytree(HOST / "sm_90", sources / "sm_90", dirs_exist_ok=True)
    for name, changes in INSTRUCTIONS.items():
        path = sources / DECODE / name
        text = path.read_text()
        for pattern, code in changes.items():
            text, count = re.subn(pattern, lambda _, code=code: code, text, flags=re.DOTALL)
            assert count == 1, f"{name}: {count} of {pattern}"
        path.write_text(text)
    return sources


def compiled(sources: Path, dtype: str, rows: int, max_tries: int | None = None) -> Path:
    """The program of an instance; with `max_tries`, as a debug build's waits are."""
    program = sources.parent / f"swap_ab_{dtype}_{rows}"
    constants = [f"-DDTYPE={dtype}", f"-DQ_ROWS={rows}"]
    if max_tries is not None:
        constants.append(f"-DMLA_MAX_TRIES={max_tries}")
    compile_on_host(sources, HOST / "swap_ab.cpp", constants, program)
    return program


def compile_on_host(sources: Path, program: Path, constants: list[str], to: Path) -> None:
    """Compiles a program, beside which cuda.hpp lies, with translated sources."""
    options = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-w", "-include", str(program.parent / "cuda.hpp")]
    command = ["g++", *options, f"-I{sources}", f"-I{program.parent}", *constants, str(program), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def ran(program: Path, problem: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *problem.split()], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return translated(tmp_path_factory.mktemp("swap_ab"))


@pytest.mark.parametrize(("dtype", "rows"), INSTANCES)
def test_results_are_those_of_fp64(sources, dtype, rows):
    program = compiled(sources, dtype, rows)
    for problem in PROBLEMS[rows]:
        done = ran(program, problem)
        assert done.returncode == 0, f"{problem}: {done.stdout}{done.stderr}"


def with_a_fault(own: Path, sources: Path, right: str, broken: str) -> Path:
    """A copy of the sources, in `own`, whose mainloop is broken in one place."""
    shutil.copytree(sources, own)
    plant(own / DECODE / "swap_ab" / "mainloop.hpp", right, broken)
    return own


FAULTS = {
    "keys overwritten early": ("if (group >= 2) wgmma_wait<1>();", "if (group >= 2) wgmma_wait<2>();"),
    "NaN behind the end": ("if (used == 0) return;", "return;"),
    "scores read early": ("    wgmma_wait<0>();\n    pin_accumulator(s);", "    pin_accumulator(s);"),
    "a stage kept": (
        "      release();\n    }\n    wgmma_wait<0>();",
        "      kv_.next();\n    }\n    wgmma_wait<0>();",
    ),
}


@each_of(FAULTS, "keys overwritten early")
def test_a_broken_mainloop_is_found(tmp_path, sources, name):
    own = with_a_fault(tmp_path / "csrc", sources, *FAULTS[name])
    assert ran(compiled(own, "fp16", 16), "5 3 7 1 2 sink 70 1 0 161 500").returncode != 0


MAX_TRIES = 4000  # of a wait, one in each round in which its warp does not sleep
PLANNED = "16 1 16 3 2 planned 100 330 200"


def test_no_wait_of_a_sound_block_traps_in_a_debug_build(sources):
    done = ran(compiled(sources, "fp16", 16, MAX_TRIES), PLANNED)
    assert done.returncode == 0, done.stdout + done.stderr


NEVER_ENDED = {
    "no stage is released": (*FAULTS["a stage kept"], "wait_for_tma_stage"),
    "no work tile is released": ("    mbarrier_arrive(barriers_.tile_empty(tiles_.stage));\n", "", "publish"),
}


@each_of(NEVER_ENDED, "no stage is released")
def test_a_wait_that_nothing_ends_traps_in_a_debug_build(tmp_path, sources, name):
    """The line that the driver prints for a device-side assert names the wait, the block and the thread."""
    right, broken, where = NEVER_ENDED[name]
    own = with_a_fault(tmp_path / "csrc", sources, right, broken)
    done = ran(compiled(own, "fp16", 16, MAX_TRIES), PLANNED)
    assert done.returncode == 3, done.stdout
    producer = (own / DECODE / "producer.hpp").read_text().splitlines()
    line = re.fullmatch(
        rf"\S+/sm_90/decode/producer\.hpp:(\d+): {where}: block: \[0,0,0\], thread: \[\d+,0,0\] "
        r"Assertion `an mbarrier's phase is complete` failed\.\n",
        done.stderr,
    )
    assert line is not None, done.stderr
    assert "mbarrier_wait(" in producer[int(line[1]) - 1]
