"""Every program of tools/ and benchmarks/ says what it is for, and runs nothing, when it is asked for --help."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    path
    for folder in ("tools", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_help_explains_every_option(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr()
    assert stopped.value.code in (0, None), printed.err
    assert f"usage: {program.name}" in printed.out
    assert re.findall(r"^  (--\S+(?: \S+)*)\n(?! {20})", printed.out, re.MULTILINE) == [], "options without a word"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("bench_served", "bench_served: needs a GPU"),
        ("bench_layer", "the layer's benchmark needs a GPU"),
        ("bench_distributed", "bench_distributed: start it with torchrun"),
    ],
)
def test_a_benchmark_says_what_it_needs(program: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit, match=sentence):
        runpy.run_path(str(ROOT / "benchmarks" / f"{program}.py"), run_name="__main__")
