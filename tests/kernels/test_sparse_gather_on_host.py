"""The source of sparse decode over bf16 rows on sm_90, executed on a CPU and compared with fp64.

The headers of tests/kernels/cuda_on_host take the place of sm_90/ptx, and those of its folder `gather` go before them.
Inline instructions of the sources become calls of these headers. test_swap_ab_on_host.py says what such a run shows and
what not.
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
FOLDERS = ("common", "sm_90/combine", "sm_90/decode", "sm_90/sparse_decode", "sm_90/ptx")
INSTRUCTION = re.compile(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)(.*?)\);', re.S)
CALLS = {"ld.shared": "ld_shared_words", "st.shared": "st_shared_words", "ldmatrix": "ldmatrix_x4"}

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


def as_call(found: re.Match[str]) -> str:
    """A call in place of one instruction; one that this kernel does not use stays as it is."""
    text, rest = "".join(re.findall(r'"([^"]*)"', found[1])), found[2]
    if not text:
        return ";"
    if text.startswith("ex2"):
        return "y = std::exp2(x); if (y < 0x1p-126f) y = 0.0f;"
    name = next((call for start, call in CALLS.items() if text.startswith(start)), None)
    if name is None:
        return found[0]
    operands, at = [], 0
    while (begin := re.compile(r'"[=+]?[rlf]"\s*\(').search(rest, at)) is not None:
        at, depth = begin.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(rest[at], 0)
            at += 1
        operands.append(rest[begin.end() : at - 1])
    used = [operands[int(number)] for number in re.findall(r"%(\d)", text)]
    address = used.pop(0 if name.startswith("st") else -1)
    return f"{name}({', '.join([address, *used])});"


def translated(folder: Path) -> Path:
    """A copy of the sources without inline instructions."""
    sources = folder / "csrc"
    for name in FOLDERS:
        shutil.copytree(CSRC / name, sources / name)
    shutil.copy(CSRC / "sm_90" / "spin_limit.hpp", sources / "sm_90")
    for path in sources.rglob("*.hpp"):
        if path.parent.name != "ptx":
            path.write_text(INSTRUCTION.sub(as_call, path.read_text()))
    for headers in (HOST / "sm_90", HOST / "gather" / "sm_90"):
        shutil.copytree(headers, sources / "sm_90", dirs_exist_ok=True)
    # beside them, because block.hpp includes tma.hpp
    for name in ("cuda.hpp", "arguments.hpp", "block.hpp", "decode_case.hpp", "sparse_gather.cpp"):
        shutil.copy(HOST / name, sources)
    return sources


def compiled(sources: Path, record: str) -> Path:
    program = sources.parent / f"gather_{record}"
    options = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-w", "-DHOST_BLOCK_THREADS=512"]
    options += ["-include", str(sources / "cuda.hpp"), f"-I{sources}", f"-DKV_FORMAT={record}"]
    command = ["g++", *options, str(sources / "sparse_gather.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def ran(program: Path, problem: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *problem.split()], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return translated(tmp_path_factory.mktemp("gather"))


@pytest.mark.parametrize("record", PROBLEMS)
def test_results_are_those_of_fp64(sources, record):
    program = compiled(sources, record)
    for problem in PROBLEMS[record]:
        done = ran(program, problem)
        assert done.returncode == 0, f"{problem}: {done.stdout}{done.stderr}"


FAULTS = {
    "stages overwritten": ("this->wait_for_empty(kv_);\n    copy_key", "copy_key"),
    "absent keys seen": ("present_ = __ballot_sync(~0u, token.present);", "present_ = ~0u;"),
    "keys not swizzled": ("(to ^ 4 << 4) + 4 * 128", "to + 4 * 128"),
}


@each_of(FAULTS, "absent keys seen")
def test_a_fault_is_found(sources, tmp_path, name):
    right, broken = FAULTS[name]
    own = tmp_path / "csrc"
    shutil.copytree(sources, own)
    plant(own / "sm_90" / "sparse_decode" / "producer_gather.hpp", right, broken)
    assert ran(compiled(own, "bf16x576"), "64 2 300 1 1 16 plain").returncode != 0
