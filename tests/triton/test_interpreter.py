"""Runs this folder's other tests with Triton's interpreter on, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process that interprets")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton==3.6.0")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
