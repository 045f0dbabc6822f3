"""Every example runs as a program and ends with the line that it promises."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from ranks import as_torchrun

ROOT = Path(__file__).parent.parent
LAST_LINE = {
    "layer.py": "decoded to lengths [74, 7, 133] with outputs of shape (3, 1, 128)",
    "paged_decode_graph.py": "lengths after ten steps: [15, 74, 75, 210]",
    "huggingface.py": "16 greedy tokens per prompt, equal to the unpatched model's: [",
    "gpu_mode.py": "y (2, 1, 7168) of a cache (2, 8192, 576) filled to 513",
    "speculative_step.py": "four drafts verified at once, equal to one by one; lengths now [44, 13]",
    "context_parallel.py": "four steps over 2 ranks, equal to one; pages left of 16: 7",
}


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(LAST_LINE)


def run(program):
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
    return 0


@pytest.mark.parametrize("name", LAST_LINE)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    """In this process, where importing torch costs nothing; ranks fork from one that has imported it."""
    if name == "huggingface.py":
        pytest.importorskip("transformers")
    program = str(ROOT / "examples" / name)
    if name == "context_parallel.py":
        (status, printed, errors), (other, *_) = as_torchrun(tmp_path, run, program)
        assert (status, other) == (0, 0), errors
    else:
        monkeypatch.setattr(sys, "argv", [])
        torch._dynamo.reset()
        run(program)
        printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(LAST_LINE[name])
