"""Slices of the soaks: some thousand captured calls of the cases that differ most, and some seconds of processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from soak_streaming import QUICK, soak

pytestmark = pytest.mark.usefixtures("sm_90_decode")


def test_alternating_calls_repeat_their_bits_beside_a_busy_stream():
    wrong = soak(list(QUICK), 100_000, busy=True, process=False, step=lambda name, count: None)
    assert set(wrong.values()) == {0}


def test_long_calls_of_several_processes():
    program = Path(__file__).with_name("soak_processes.py")
    kinds = ["--kinds", "short,batch,sparse,extend"]
    command = [sys.executable, str(program), "--processes", "4", "--seconds", "5", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
