"""Every example runs as a program and ends with the line that it promises."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
LAST_LINE = {
    "layer.py": "decoded to lengths [74, 7, 133] with outputs of shape (3, 1, 128)",
    "paged_decode_graph.py": "lengths after ten steps: [15, 74, 75, 210]",
    "huggingface.py": "16 greedy tokens per prompt, equal to the unpatched model's: [",
    "gpu_mode.py": "y (2, 1, 7168) of a cache (2, 8192, 576) filled to 513",
    "speculative_step.py": "four drafts verified at once, equal to one by one; lengths now [44, 13]",
    "context_parallel.py": "four steps over 2 ranks, equal to one; pages left of 16: 7",
}
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(LAST_LINE)


@pytest.mark.parametrize("name", LAST_LINE)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    """In this process, where importing torch costs nothing, but for the one whose ranks are processes."""
    if name == "huggingface.py":
        pytest.importorskip("transformers")
    program = str(ROOT / "examples" / name)
    if name == "context_parallel.py":
        environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, *RANKS, program]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        monkeypatch.setattr(sys, "argv", [program])
        torch._dynamo.reset()
        runpy.run_path(program, run_name="__main__")
        printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(LAST_LINE[name])
