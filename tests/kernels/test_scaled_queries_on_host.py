"""bf16 queries of e4m3 caches, which decode on sm_90 multiplies as fp16, executed on a CPU and compared with fp64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import decode_on_host
import pytest


def scores(sources: Path, width: int, heads: int, spread: str) -> subprocess.CompletedProcess[str]:
    program = sources.parent / f"scaled_queries_{width}"
    if not program.exists():
        decode_on_host.compiled(program, "scaled_queries.cpp", sources, [f"-DD_QK={width}"])
    return subprocess.run([str(program), str(heads), spread], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return decode_on_host.translated(tmp_path_factory.mktemp("scaled_queries"))


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize(
    ("heads", "spread"),
    [(64, "plain"), (64, "wide"), (64, "apart"), (64, "zeros"), (64, "nan"), (40, "wide"), (33, "plain"), (3, "apart")],
)
def test_scores_are_those_of_fp64(sources, width, heads, spread):
    done = scores(sources, width, heads, spread)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("right", "broken"),
    [
        ("const int wanted = min(max(127 + 14 - exponent, -112), 112);", "const int wanted = 0;"),
        ("size = max(size, __shfl_xor_sync(~0u, size, 2));", ""),
        ("+ half * 512 +", "+ half * 256 +"),
    ],
    ids=["not scaled", "the largest of half a row", "the wrong row"],
)
def test_a_broken_conversion_is_found(tmp_path, sources, right, broken):
    own = tmp_path / "csrc"
    shutil.copytree(sources, own)
    path = own / decode_on_host.DECODE / "query_operands.hpp"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, broken))
    assert scores(own, 576, 64, "wide").returncode != 0
